"""The table at the end of `megasync chaos`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megasync.chaos.run import Verdict


def verdict_tables(verdict: Verdict) -> RenderableType:
    faults = Table("at", "after step", "fault", "how", "recovery time")
    for fault in verdict.faults:
        recovered = "never" if fault.recovered is None else f"{fault.recovered:.1f} s"
        faults.add_row(f"{fault.at:.0f} s", str(fault.step), fault.kind, fault.how, recovered)
    facts = Table.grid(padding=(0, 2))
    balance = f"{verdict.trained} trained + {verdict.dropped} dropped + {verdict.live} live"
    scores = " -> ".join(f"{score:.3f}" for score in (verdict.scores[:1] + verdict.scores[-1:])) or "-"
    for name, value in (
        ("run", str(verdict.run_dir)),
        ("steps", str(verdict.steps)),
        ("ledger", f"{verdict.admitted} admitted = {balance}"),
        ("staleness", f"{verdict.staleness:.0f} at most, {verdict.staleness_bound} allowed"),
        ("held-out score", scores),
    ):
        facts.add_row(name, value)
    last = Text("nothing was lost", style="green")
    if verdict.problems:
        last = Text("\n".join(verdict.problems), style="red")
    return Group(faults, facts, last)
