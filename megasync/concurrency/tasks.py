"""Asynchronous helpers: backoff between retries, running coroutines that fail together, killing a process pool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from concurrent.futures import ProcessPoolExecutor
from typing import Any

# Maximum wait, in seconds, until a killed process is reaped.
REAP_SECONDS = 5.0


class Backoff:
    """Exponential backoff with jitter, so that requests that fail at the same time are not retried at the same time."""

    def __init__(self, first_and_longest: tuple[float, float], rng: random.Random | None = None) -> None:
        """Takes the first and the maximum delay, in seconds. `rng` is the source of the jitter."""
        self._first, self._longest = first_and_longest
        self._delay = self._first
        self._uniform = rng.uniform if rng else random.uniform

    def next(self) -> float:
        """Returns the delay before the next attempt, in seconds, with a jitter of 25%. Doubles the following delay."""
        delay, self._delay = self._delay, min(2 * self._delay, self._longest)
        return delay * self._uniform(0.75, 1.25)

    def reset(self) -> None:
        """Returns to the first delay, after a successful attempt."""
        self._delay = self._first


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines concurrently. If one fails, cancels the others, waits for them to end and raises its error.

    Unlike `asyncio.TaskGroup` it raises the error itself, not a group of errors.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def kill_pool(pool: ProcessPoolExecutor) -> None:
    """Kills the workers. Running calls end with BrokenProcessPool; `pool.shutdown` alone would wait for them."""
    workers = list((pool._processes or {}).values())
    for worker in workers:
        worker.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.join(timeout=REAP_SECONDS)
