"""An asyncio event loop with virtual time.

The clock is paused while any callback is ready, then jumps to the next timer. A run of hours takes only the time that
its callbacks need. Where a real loop would run forever, this one raises `Deadlock` or `Livelock`.
"""

from __future__ import annotations

import asyncio
import selectors

from megasync.observe.stacks import describe_tasks

# Maximum iterations of the loop at one moment of virtual time; real work needs a few hundred.
ROUNDS_AT_ONCE = 100_000


class Deadlock(Exception):
    """No callback is ready and no timer is set: every task waits for another task."""


class Livelock(Exception):
    """Callbacks keep running while virtual time does not advance."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is virtual, in seconds from 0."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Timers(self))

    def time(self) -> float:
        return self._now

    def sleep_until_timer(self, seconds: float | None) -> None:
        if seconds is None:
            raise Deadlock(f"at {self._now:.3f} s no timer is set and no task can run:\n{self.describe()}")
        self._now += seconds

    def describe(self) -> str:
        return describe_tasks(asyncio.all_tasks(self))


class _Timers(selectors.SelectSelector):
    """A selector that never reports a ready socket: it advances the virtual time to the next timer instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list:
        if timeout is not None and timeout <= 0:
            self._rounds += 1
            if self._rounds > ROUNDS_AT_ONCE:
                raise Livelock(f"{ROUNDS_AT_ONCE} rounds at {self._loop.time():.3f} s:\n{self._loop.describe()}")
        else:
            self._rounds = 0
            self._loop.sleep_until_timer(timeout)
        return []
