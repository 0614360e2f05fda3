"""Asynchronous helpers: backoff between retries, tasks that end together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


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


async def within(awaitable: Awaitable[T], seconds: float | None) -> T:
    """The result of ``awaitable``. Raises TimeoutError if there is none after ``seconds``; None waits for ever.

    `asyncio.wait_for` of Python 3.11 loses a cancellation, and so a Ctrl-C, that arrives together with the result.
    """
    async with asyncio.timeout(seconds):
        return await awaitable


async def gather_or_cancel(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Runs coroutines concurrently and returns their results, in order.

    If one fails, cancels the others, waits for them to end and raises its error. Unlike `asyncio.TaskGroup`
    it raises the error itself, not a group of errors.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def wait_for_first(*tasks: asyncio.Future[Any]) -> Any:
    """Waits until one task has ended, cancels the others and waits for them. Returns or raises what the ended one did.

    If several have ended, an error counts more than a result, and then the order of the tasks.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        results = [task.result() for task in tasks if task.done()]
        return results[0]
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and waits until all have ended. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also if this task is cancelled meanwhile: that is raised afterwards.

    The coroutine needs a deadline of its own. A second cancellation does not wait for it.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits until the event is set; returns False if it is not within `seconds`."""
    with suppress(TimeoutError):
        await within(event.wait(), seconds)
    return event.is_set()
