"""Tells a stalled run from one that works: by what was finished, never by what is in flight.

A wedged server keeps its requests in flight for ever, so requests, pings and heartbeats prove nothing. Committed groups
and trained steps do.

Work that has a deadline of its own is no silence while it goes on: a training step, a save, a restart of the ranks, a
publish, a buffer that reads its ledger. Its time is left out of the count, and its end adds no progress: a run that only ever recovers is still ended.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager


class Watchdog:
    """`silent(...)` is the time in seconds since any of the numbers that it is shown last changed, outside `bounded`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: Hashable = None
        # Bounded work under way, when the first of it began, and the seconds of all that has ended.
        self._under_way = 0
        self._began = 0.0
        self._left_out = 0.0
        self._since = self._counted()

    def silent(self, *finished: int) -> float:
        """`finished` counts what was done so far, such as groups and steps; a step trained again counts as one."""
        if finished != self._seen:
            self._seen, self._since = finished, self._counted()
        return self._counted() - self._since

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Around work that ends by a deadline of its own. May overlap with other such work."""
        if not self._under_way:
            self._began = self._clock()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._left_out += self._clock() - self._began

    def _counted(self) -> float:
        """The clock without the time of bounded work."""
        return (self._began if self._under_way else self._clock()) - self._left_out
