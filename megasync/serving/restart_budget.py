"""How many restarts a crashing process gets within a time window, and the backoff between them. Pure; takes a clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Seconds of backoff before the second restart within the window, doubled for each further one up to the maximum. The
# first restart is immediate.
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0


class RestartBudget:
    """At most `limit` restarts in any `window` seconds."""

    def __init__(self, limit: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.window = window
        self._clock = clock
        self._times: deque[float] = deque()

    def take(self) -> float | None:
        """Takes one restart; returns the seconds to wait before it, or None when the budget of the window is spent."""
        now = self._clock()
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return None
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (len(self._times) - 1)) if self._times else 0.0
        # Counted from the moment it begins: a long backoff must not let it leave the window early.
        self._times.append(now + wait)
        return wait

    def refund(self) -> None:
        """Returns the latest restart to the budget, because the process was not at fault."""
        if self._times:
            self._times.pop()
