"""How far the clocks of other hosts are from the driver's, measured when a process starts.

    driver: before ── ask ──▶ host: its time ── answer ──▶ driver: after        offset = (before + after) / 2 - its time

The error is at most half of the round trip, so the fastest of a few counts. Processes of one host share its clock: they
are recognised by the kernel's boot id, and their offset is exactly 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from pathlib import Path
from platform import node
from typing import NamedTuple

ROUND_TRIPS = 5


class Reading(NamedTuple):
    """A host and the time on its clock, in seconds since the epoch."""

    host: str
    time: float


def read_clock() -> Reading:
    """The time here."""
    return Reading(_host(), time.time())


async def clock_offset(ask: Callable[[], Awaitable[Reading]]) -> float:
    """The seconds to add to the clock of the process that answers, to get this process's."""
    fastest, offset = float("inf"), 0.0
    for _ in range(ROUND_TRIPS):
        before = time.time()
        reading = await ask()
        after = time.time()
        if reading.host == _host():
            return 0.0
        if after - before < fastest:
            fastest, offset = after - before, (before + after) / 2 - reading.time
    return offset


async def clock_offsets(readings: Sequence[Reading], ask: Callable[[int], Awaitable[Reading]]) -> dict[str, float]:
    """The offsets of all hosts but this one, of the processes that gave the readings. One process of each is asked."""
    first = {reading.host: number for number, reading in reversed([*enumerate(readings)]) if reading.host != _host()}
    offsets = await asyncio.gather(*(clock_offset(partial(ask, number)) for number in first.values()))
    return dict(zip(first, offsets, strict=True))


@cache
def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return node()
