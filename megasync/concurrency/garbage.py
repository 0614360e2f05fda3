"""Short garbage collections in a process with very many live objects.

CPython's collector scans every object that has survived its younger generations. With ten thousand requests in flight
that takes half a second, in which the event loop is blocked, and it finds next to nothing: requests hardly ever leave
reference cycles. So survivors are frozen, which exempts them from collection; reference counting still frees them.
Cycles among them are collected by long collections, which take FULL_SHARE of the time: often while few objects live.

Python begins a collection when more objects were made than freed. Where old objects end as fast as new ones are made,
that hardly ever happens, and then there are very many young ones. So young objects are collected by the clock, every
LEAST_SECONDS; and less often where that would take more than a SHARE of the time, as under full load, when most objects
are freed before they are scanned. Between two of these, YOUNG more objects begin one.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megasync.concurrency.tasks import cancel_and_wait

# Most seconds between two collections of all objects, those before the first, and the part of the time that they may
# take. They bound what cycles can leak, for example those of tracebacks.
FULL_SECONDS = 1800.0
FIRST_SECONDS = 300.0
FULL_SHARE = 0.001
# Seconds between two collections of young objects, and the part of the time that these may take.
LEAST_SECONDS = 0.1
SHARE = 0.05
# About as many objects as a few hundred requests hold while they are answered.
YOUNG = 50_000


@asynccontextmanager
async def short_collections() -> AsyncIterator[None]:
    """Context in which this process's automatic collections are short."""
    collections = [
        asyncio.create_task(_collect_all(), name="full garbage collection"),
        asyncio.create_task(_collect_young(), name="young garbage collection"),
    ]
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
        await cancel_and_wait(*collections)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    # Even those of generation 0: a second look would come within milliseconds, while a request takes seconds.
    if phase == "stop":
        gc.freeze()


async def _collect_all() -> None:
    pause = FIRST_SECONDS
    while True:
        await asyncio.sleep(min(pause, FULL_SECONDS))
        began = time.perf_counter()
        gc.unfreeze()
        gc.collect()
        pause = (time.perf_counter() - began) / FULL_SHARE


async def _collect_young() -> None:
    pause = LEAST_SECONDS
    while True:
        await asyncio.sleep(pause)
        began = time.perf_counter()
        gc.collect(0)
        pause = max(LEAST_SECONDS, (time.perf_counter() - began) / SHARE)
