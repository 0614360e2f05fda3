"""Many schedules, over some processes, and how they ended."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rich.console import Console
from rich.table import Table

from megasync.sim.world import Outcome, simulate

# Schedules that a process is given at a time.
CHUNK = 20


def report(seeds: Iterable[int], history: bool, console: Console, jobs: int = 1) -> int:
    """Prints how many schedules ended in which way and what they met; 1 at the first one that breaks a law, else 0."""
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed, outcome in _outcomes(seeds, jobs):
        if isinstance(outcome, str):
            console.print(outcome, highlight=False, markup=False, soft_wrap=True)
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


def _outcomes(seeds: Iterable[int], jobs: int) -> Iterator[tuple[int, Outcome | str]]:
    """In the order of the seeds, whichever process is done first."""
    if jobs == 1:
        yield from map(_outcome, seeds)
        return
    # Not forked: a schedule must find a process as the first one does.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(_outcome, seeds, chunksize=CHUNK)
        finally:
            pool.shutdown(cancel_futures=True)


def _outcome(seed: int) -> tuple[int, Outcome | str]:
    """How a schedule ended, or the traceback of the law that it broke."""
    try:
        return seed, simulate(seed)
    except Exception as error:  # noqa: BLE001 - a broken law, or whatever a run should not have raised
        return seed, "".join(traceback.format_exception(error))
