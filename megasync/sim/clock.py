"""An asyncio event loop whose time is virtual: it stands still while anything can run, and then jumps to the next timer.

A run of hours takes as long as its callbacks. What a real loop would do for ever, this one refuses: waiting when no timer
is set, since nobody is left who could wake it (`Deadlock`), and running without end at one moment (`Livelock`).
"""

from __future__ import annotations

import asyncio
import selectors

from megasync.observe.awaits import describe_tasks

# Rounds of the loop at one moment of virtual time; real work needs some hundreds.
ROUNDS_AT_ONCE = 100_000


class Deadlock(Exception):
    """Nothing can run and no timer is set: every task waits for another one."""


class Livelock(Exception):
    """Callbacks follow each other without end while no time passes."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Timers(self))

    def time(self) -> float:
        return self._now

    def sleep_until_timer(self, seconds: float | None) -> None:
        if seconds is None:
            raise Deadlock(
                f"at {self._now:.3f} s nothing is left that could wake anybody:\n{describe_tasks(asyncio.all_tasks(self))}"
            )
        self._now += seconds


class _Timers(selectors.SelectSelector):
    """Stands where the loop looks for ready sockets: there are none, only the time until its next timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list:
        if timeout is not None and timeout <= 0:
            self._rounds += 1
            if self._rounds > ROUNDS_AT_ONCE:
                raise Livelock(
                    f"{ROUNDS_AT_ONCE} rounds at {self._loop.time():.3f} s:\n{describe_tasks(asyncio.all_tasks(self._loop))}"
                )
        else:
            self._rounds = 0
            self._loop.sleep_until_timer(timeout)
        return []
