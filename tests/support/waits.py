"""Waits for what has no event of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

# Seconds after which a wait fails: many times what anything here takes on a machine that does other work beside it.
PATIENCE = 500.0
Found = TypeVar("Found")


async def until(holds: Callable[[], object]) -> None:
    """Returns once the condition holds. Raises TimeoutError after `PATIENCE`."""
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.002)


def wait_until(holds: Callable[[], Found], what: Callable[[], object] = str) -> Found:
    """Blocks until the condition holds, and returns its value. Raises AssertionError with `what()` after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
    return found


def deadlines() -> Iterator[float]:
    """Growing seconds for what must have begun when its deadline ends it: a busy machine needs longer for that."""
    seconds = 0.5
    while seconds < PATIENCE:
        yield seconds
        seconds *= 4
