"""Short garbage collections in a process with very many live objects.

CPython's collector scans every object that has survived its younger generations. With ten thousand requests in flight
that takes half a second, in which the event loop is blocked, and it finds next to nothing: requests hardly ever leave
reference cycles. So survivors are frozen, which exempts them from collection; reference counting still frees them.
Cycles among them are collected by one long collection every FULL_SECONDS.

A collection begins when YOUNG more objects were made than freed. By Python's default of 700, a burst of requests would
have the objects of its own requests scanned, which are freed a moment later.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megasync.concurrency.tasks import cancel_and_wait

# Seconds between two collections of all objects. They bound what cycles can leak, for example those of tracebacks.
FULL_SECONDS = 1800.0
# About as many objects as several hundred requests hold, which are scanned in a few milliseconds.
YOUNG = 50_000


@asynccontextmanager
async def short_collections() -> AsyncIterator[None]:
    """Context in which this process's automatic collections are short."""
    full = asyncio.create_task(_collect_all(), name="garbage collection")
    gc.freeze()
    gc.callbacks.append(_freeze_survivors)
    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNG)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(_freeze_survivors)
        gc.unfreeze()
        await cancel_and_wait(full)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    # Even those of generation 0: a second look would come within milliseconds, while a request takes seconds.
    if phase == "stop":
        gc.freeze()


async def _collect_all() -> None:
    while True:
        await asyncio.sleep(FULL_SECONDS)
        gc.unfreeze()
        gc.collect()
