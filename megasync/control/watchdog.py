"""Tells a stalled run from a slow one by what was completed, never by what is in flight.

A wedged server keeps its requests in flight for ever, so requests, pings and heartbeats prove nothing. Committed groups
and trained steps do.

Work with a deadline of its own does not count as a stall: a training step, a save, a restart of the ranks, a publish, a
buffer that reads its ledger. Its time is left out, but it counts as no progress either: a run that only ever recovers
is still ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager


class Watchdog:
    """Measures the seconds since the last progress, leaving out the time spent inside `bounded`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: Hashable = None
        # Bounded work in progress: how many, since when; and the seconds of all that has ended.
        self._in_progress = 0
        self._began = 0.0
        self._left_out = 0.0
        self._since = self._counted()

    def stalled_seconds(self, *completed: int) -> float:
        """Seconds since any of these counters (groups, steps) last changed. A step that is trained again counts."""
        if completed != self._seen:
            self._seen, self._since = completed, self._counted()
        return self._counted() - self._since

    @contextmanager
    def bounded(self) -> Generator[None]:
        """Wraps work that has a deadline of its own. May overlap with other such work."""
        if not self._in_progress:
            self._began = self._clock()
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._left_out += self._clock() - self._began

    def _counted(self) -> float:
        """The clock without the time of bounded work."""
        return (self._began if self._in_progress else self._clock()) - self._left_out
