"""What went wrong and what it cost: each fault until the next step, where every prompt is, and the reports of it."""

from __future__ import annotations

import asyncio

from nicegui import ui

from megasync.observe.registry import metric_of
from megasync.watch import units
from megasync.watch.elements import Cell, Reading, Shares, Table, card, text, trouble, why_none
from megasync.watch.evidence import Evidence, find_evidence, read_evidence
from megasync.watch.run_folder import ACTIVE, RunFolder
from megasync.watch.view import Place, Update, together

# Counters of metrics.jsonl, which also tell of runs that recorded no events.
COUNTERS = (
    "faults/trainer_restarts",
    "faults/steps_trained_again",
    "faults/steps_set_aside",
    "faults/failed_publishes",
    "faults/parity_restarts",
    "fleet/restarts",
    "fleet/router_restarts",
    "fleet/gray_answers",
    "fleet/gray_slow",
    "fleet/gray_parity",
    "rollout/workers_lost",
    "rollout/server_failures",
    "rollout/sessions_silent",
    "rollout/samples_failed",
    "rollout/failures_infrastructure",
    "rollout/failures_agent",
    "rollout/failures_grader",
    "rollout/failures_code",
    "rollout/poison_prompts",
    "rollout/worker_poison",
)
# Of samples, by what failed: `failures/<name>/<kind>`.
FAILURES = "failures/"
KINDS = ("infrastructure", "agent", "grader", "code")
PALETTE = ("var(--orange)", "var(--red)", "var(--purple)", "var(--sky)", "var(--gray)")


def build(run: RunFolder, place: Place) -> Update:
    """Draws the faults of a run."""
    parts = [trouble(run), _readings(run)]
    with ui.element("div").classes("grid"):
        parts += [
            _list(run),
            *([_balance(run)] if run.buffered else []),
            _counters(run),
            _evidence(run),
            _failures(run),
        ]
    return together(parts)


def _readings(run: RunFolder) -> Update:
    with ui.element("div").classes("readings"):
        count, slowest, open_now = Reading("Faults"), Reading("Longest to the next step"), Reading("Not recovered")
        again = Reading("Steps repeated")
        of_prompts = [_of_prompts(run)] if run.buffered else []

    def update() -> None:
        faults = run.faults
        count.show(str(len(faults)), below=f"newest {units.age(faults[-1].time)}" if faults else "none recorded")
        times = [fault.seconds_to_next_step for fault in faults if fault.seconds_to_next_step is not None]
        slowest.show(units.duration(max(times, default=None)), below="from a fault to a trained step")
        waiting = [fault.what for fault in faults if fault.recovered is None]
        open_now.show(str(len(waiting)), below=", ".join(dict.fromkeys(waiting)) or "everything works again")
        again.show(
            units.number(run.metrics.latest("faults/steps_trained_again")), below="trained again after a restart"
        )

    return together([update, *of_prompts])


def _of_prompts(run: RunFolder) -> Update:
    """Draws what only a run with a buffer has."""
    lost, dropped = Reading("Prompts lost"), Reading("Prompts dropped")

    def update() -> None:
        balance = run.balance
        if balance is None:
            lost.show(units.NOTHING, below="no ledger, and no counts in the metrics")
            return
        lost.show(str(balance.lost), below="of all that were admitted")
        total = sum(balance.dropped.values())
        below = f"{units.share(total / balance.admitted)} of those admitted" if balance.admitted else ""
        dropped.show(units.number(total), below=below)

    return update


def _list(run: RunFolder) -> Update:
    with card("Faults", "newest first", "two-thirds" if run.buffered else "all"), ui.element("div").classes("scroll"):
        table = Table(
            ("time", "part", "what happened", "working after", "next step after"),
            ("working after", "next step after"),
            wide="what happened",
        )
        empty = text("div", "", "empty")

    def update() -> None:
        rows: list[tuple[Cell, ...]] = []
        for fault in reversed(run.faults):
            again = "not yet" if run.status in ACTIVE else "never"
            rows.append(
                (
                    units.moment(fault.time, run.end),
                    fault.what,
                    fault.text,
                    again if fault.recovered is None else units.duration(fault.recovered - fault.time),
                    again if fault.seconds_to_next_step is None else units.duration(fault.seconds_to_next_step),
                )
            )
        table.show(rows)
        recorded = "No part of this run has died or failed." if run.events else "This run has no events.jsonl."
        empty.say("" if rows else recorded)

    return update


def _balance(run: RunFolder) -> Update:
    with card("Where every prompt is", width="third"):
        shares = Shares(units.number)
        verdict = text("div", "", "note verdict")

    def update() -> None:
        balance = run.balance
        if balance is None:
            verdict.say("Neither the ledger nor the metrics of this run tell.")
            return
        parts = {"trained": (float(balance.trained), "var(--blue)"), "live": (float(balance.live), "var(--green)")}
        reasons = sorted(balance.dropped.items(), key=lambda item: -item[1])
        for number, (reason, count) in enumerate(reasons):
            parts[f"dropped: {reason}"] = (float(count), PALETTE[min(number, len(PALETTE) - 1)])
        shares.show(parts, max(1.0, float(balance.admitted)))
        total = sum(balance.dropped.values())
        sums = f"{balance.trained} trained + {total} dropped + {balance.live} live"
        equal = "=" if not balance.lost else "≠"
        verdict.say(f"{balance.admitted} admitted {equal} {sums} (from {balance.source})")

    return update


def _counters(run: RunFolder) -> Update:
    with card("Counts", "since the driver last started", "third"):
        table = Table(("what", "count"), ("count",), wide="what")
        empty = text("div", "", "empty")

    def update() -> None:
        counts = {name: run.metrics.latest(name) for name in COUNTERS}
        entries = {name: (count, metric_of(name)) for name, count in counts.items() if count}
        table.show(
            [(metric.meaning if metric else name, units.number(count)) for name, (count, metric) in entries.items()]
        )
        measured = any(count is not None for count in counts.values())
        empty.say("" if entries else "All are zero." if measured else why_none(run, "counts"))

    return update


def _failures(run: RunFolder) -> Update:
    """Draws the failures of samples by environment, tool server, reward function or workflow, and what is paused."""
    with card("Failures of samples", "since the driver last started", "third"):
        table = Table(("of", *KINDS, "now"), KINDS, wide="of")
        empty = text("div", "", "empty")

    def update() -> None:
        counts: dict[str, dict[str, float]] = {}
        for metric in run.metrics.names:
            name, slash, kind = metric.removeprefix(FAILURES).rpartition("/")
            if metric.startswith(FAILURES) and slash:
                counts.setdefault(name, {})[kind] = run.metrics.latest(metric) or 0.0
        table.show(
            [
                (name, *(units.number(of.get(kind, 0.0)) for kind in KINDS), "paused" if of.get("paused") else "")
                for name, of in sorted(counts.items())
                if any(of.values())
            ]
        )
        empty.say("" if any(map(any, (of.values() for of in counts.values()))) else "No sample has failed.")

    return update


def _evidence(run: RunFolder) -> Update:
    """Reports of hangs, failed and skipped steps. The text of one is read when it is opened."""
    with card("Reports", "hangs, failed and skipped steps", "two-thirds"):
        box = ui.element("div")
        empty = text("div", "", "empty")
    shown: list[Evidence] = []

    def update() -> None:
        reports = find_evidence(run.path)
        empty.say("" if reports else "This run has written no reports.")
        if reports != shown:
            shown[:] = reports
            box.clear()
            with box:
                for evidence in reports:
                    _report(evidence)

    return update


def _report(evidence: Evidence) -> None:
    with ui.element("details").classes("text-block") as block:
        with ui.element("summary"):
            text("span", f"{units.day_and_clock(evidence.time)}  ", "muted")
            text("span", f"{evidence.kind}: {evidence.title}")
        body = text("pre", "reading ...")

    async def read() -> None:
        body.say(await asyncio.to_thread(read_evidence, evidence))

    block.on("toggle", read, args=[])
