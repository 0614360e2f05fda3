"""Runs many schedules, optionally in several processes, and summarizes how they ended."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from rich.console import Console
from rich.table import Table

from megasync.lab.sim.schedule import Outcome, simulate

# Schedules that a worker process receives at a time.
CHUNK = 20


def report(seeds: Iterable[int], history: bool, console: Console, jobs: int = 1) -> int:
    """Print how often each ending and each fault occurred. Returns 0.

    At the first schedule that fails, print its traceback and return 1.
    """
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
    """Yield the outcomes in the order of the seeds, whichever process finishes first."""
    if jobs == 1:
        yield from map(_outcome, seeds)
        return
    # Spawned, not forked: every schedule must start from a fresh process state.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(_outcome, seeds, chunksize=CHUNK)
        finally:
            pool.shutdown(cancel_futures=True)


def _outcome(seed: int) -> tuple[int, Outcome | str]:
    """Return how a schedule ended, or the traceback of its error."""
    try:
        return seed, simulate(seed)
    except Exception as error:  # noqa: BLE001 - a violated invariant, or any error that a run must not raise
        return seed, "".join(traceback.format_exception(error))
