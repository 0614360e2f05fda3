"""What went wrong: faults, counters that should be zero, and where the admitted prompts are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megasync.observe.registry import metric_of
from megasync.watch import units
from megasync.watch.document import Cell, Number, Section, Table, Text, seconds, shortened
from megasync.watch.run_folder import RunFolder

# Faults that are listed, more are counted; and characters of each.
SHOWN_FAULTS, CHARACTERS = 200, 600
# Counters that grow in every run.
EXPECTED_COUNTS = {"rollout/tokens", "rollout/groups", "groups/admitted", "groups/trained"}


def troubles(run: RunFolder) -> Section:
    section = Section("What went wrong")
    faults = run.faults
    rows: list[Sequence[Cell]] = [
        (
            units.duration(float(run.elapsed(np.array([fault.time]))[0])),
            fault.what,
            shortened(fault.text, CHARACTERS),
            None if fault.recovered is None else seconds(fault.recovered - fault.time),
            seconds(fault.seconds_to_next_step),
        )
        for fault in faults[:SHOWN_FAULTS]
    ]
    more = f" The first {SHOWN_FAULTS} of {len(faults)}." if len(faults) > SHOWN_FAULTS else ""
    headings = ("After", "What", "Fault", "Recovered after", "Next step after")
    section.add(Table(f"Faults.{more}", headings, rows, texts=("Fault",)))
    if not faults:
        recorded = "No fault was recorded." if run.events else "The run recorded no events: its faults are not known."
        section.add(Text(recorded))
    section.add(_counts(run), _drops(run))
    return section


def _counts(run: RunFolder) -> Table:
    """Counters of what should not happen, those that are not zero."""
    rows: list[Sequence[Cell]] = []
    for name in [
        *run.under("faults/"),
        *run.under("fleet/"),
        *run.under("rollout/"),
        *run.under("groups/"),
        *run.under("train/skipped"),
    ]:
        entry = metric_of(name)
        if (
            entry is None
            or not (entry.counts or name == "train/skipped")
            or name in EXPECTED_COUNTS
            or "dropped" in name
        ):
            continue
        total = run.series(name).total if entry.counts else float(run.values(name).sum())
        if total:
            rows.append((name, Number(total, f"{total:g}"), entry.unit, entry.meaning))
    return Table("Counters of faults and losses that are not zero.", ("Metric", "Total", "Unit", "Meaning"), rows)


def _drops(run: RunFolder) -> Table | None:
    balance = run.balance
    if balance is None:
        return None
    rows: list[Sequence[Cell]] = [
        ("admitted", Number(balance.admitted, str(balance.admitted))),
        ("trained", Number(balance.trained, str(balance.trained))),
        *((f"dropped: {reason}", Number(count, str(count))) for reason, count in sorted(balance.dropped.items())),
        ("live: neither trained nor dropped yet", Number(balance.live, str(balance.live))),
        ("unaccounted for", Number(balance.lost, str(balance.lost))),
    ]
    verdict = "Every admitted prompt is accounted for" if balance.lost == 0 else "Prompts are unaccounted for"
    return Table(f"{verdict}, by {balance.source}.", ("Prompts", "Groups"), rows)
