"""Many schedules, one after another, and how they ended."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from megasync.sim.world import simulate


def report(seeds: Iterable[int], history: bool, console: Console) -> int:
    """Prints how many schedules ended in which way and what they met; 1 at the first one that breaks a law, else 0."""
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = simulate(seed)
        except Exception as error:  # noqa: BLE001 - a broken law, or whatever a run should not have raised
            console.print("".join(traceback.format_exception(error)), highlight=False, markup=False, soft_wrap=True)
            console.print(f"seed {seed} fails; `megasync simulate --seed {seed} --history` repeats it")
            return 1
        ends[outcome.ended] += 1
        faults.update(outcome.faults)
        if history:
            console.print("\n".join(outcome.history), highlight=False, markup=False, soft_wrap=True)
    for title, counts in (("schedules ended", ends), ("faults met", faults)):
        table = Table(title, "times")
        for name, count in counts.most_common():
            table.add_row(name, str(count))
        console.print(table)
    return 0
