"""Tells a run that stands still from one that works: by what was finished, never by what is under way.

A wedged server keeps its requests in flight for ever, so requests, pings and heartbeats prove nothing. Committed groups
and trained steps do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Watchdog:
    """`silent(...)` is the time in seconds since any of the numbers that it is shown last changed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: Hashable = None
        self._since = clock()

    def silent(self, *finished: int) -> float:
        """`finished` counts what was done so far, such as groups and steps; a step trained again counts as one."""
        if finished != self._seen:
            self._seen, self._since = finished, self._clock()
        return self._clock() - self._since
