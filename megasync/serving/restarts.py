"""How often something that dies may be started again, and how long to wait before. Pure; the clock is passed in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Seconds before a second restart within the window, doubled for each further one up to the longest; the first is free.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0


class Restarts:
    """At most `limit` restarts in any `window` seconds."""

    def __init__(self, limit: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.window = window
        self._clock = clock
        self._times: deque[float] = deque()

    def next_wait(self) -> float | None:
        """Counts a restart and says after how many seconds it may begin; None when the window holds too many already."""
        now = self._clock()
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return None
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (len(self._times) - 1)) if self._times else 0.0
        # It counts from when it begins: a long wait must not let it leave the window early.
        self._times.append(now + wait)
        return wait

    def forgive(self) -> None:
        """Takes one restart back: what it was for was no fault of what was started again."""
        if self._times:
            self._times.pop()
