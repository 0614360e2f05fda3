"""Fair turns by tokens: of those who have work, the one that has received the least comes next.

A newcomer, or one that had nothing to do, begins at the level of the last turn, so it can save up no share. Over any
time in which two have work, what they receive differs by at most the cost of the two largest requests.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")

# Seconds that a call counts at least, so that many short ones are no gift.
_LEAST_SECONDS = 1e-4
# Two threads that both compute get as much done with it as with the default.
_SWITCH_SECONDS = 5e-5


class FairTurns:
    """Gives turns to names. A turn costs tokens."""

    def __init__(self) -> None:
        self._received: dict[str, float] = {}
        self._level = 0.0
        self._waiting: set[str] = set()

    def next(self, names: Iterable[str]) -> str:
        """The name whose turn it is, among all that have work now. The first of equals."""
        names = list(names)
        for name in names:
            if name not in self._waiting:
                self._received[name] = max(self._received.get(name, 0.0), self._level)
        self._waiting = set(names)
        chosen = min(names, key=self._received.__getitem__)
        self._level = self._received[chosen]
        return chosen

    def charge(self, name: str, tokens: float) -> None:
        self._received[name] = self._received.get(name, self._level) + tokens

    def forget(self, name: str) -> None:
        """Forgets a name that never comes again."""
        self._received.pop(name, None)


class FairThread:
    """Calls functions in a thread, one at a time; next comes the name whose calls have taken the least time so far."""

    def __init__(self) -> None:
        self._turns = FairTurns()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._busy = False

    async def run(self, name: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Returns what a function returns. Whoever stops to wait for one that runs does not let the next begin."""
        loop = asyncio.get_running_loop()
        await self._turn(name)
        began = loop.time()

        def ended(work: asyncio.Future[Result]) -> None:
            self._turns.charge(name, max(loop.time() - began, _LEAST_SECONDS))
            self._next()
            if not work.cancelled():
                # Whoever waited for it may be gone.
                work.exception()

        work = loop.run_in_executor(None, call, *arguments)
        work.add_done_callback(ended)
        return await asyncio.shield(work)

    async def _turn(self, name: str) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._next()
            raise

    def _next(self) -> None:
        self._busy = False
        while self._waiting and not self._busy:
            name = self._turns.next(self._waiting)
            turn = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            if not turn.done():
                self._busy = True
                turn.set_result(None)


class Rounds:
    """Lets each name begin one thing in a round of the event loop; further ones wait for the next.

    However many of a name's requests have arrived, those of the others so wait for one of them at a time.
    """

    def __init__(self) -> None:
        self._begun: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def turn(self, name: str) -> None:
        """Returns when something of the name may begin, in the order of calls."""
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        if name not in self._waiting and name not in self._begun:
            self._begun.add(name)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        await turn

    def _next(self) -> None:
        self._begun.clear()
        for name, queue in [*self._waiting.items()]:
            while queue and name not in self._begun:
                if not (turn := queue.popleft()).done():
                    turn.set_result(None)
                    self._begun.add(name)
            if not queue:
                del self._waiting[name]
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)


def share_with_threads() -> None:
    """Lets threads of this process go on soon beside a busy event loop.

    A thread that writes files or to SQLite needs the interpreter's lock again after each call of the system. By
    Python's default it waits for 5 ms each time, so that a busy tenant would make all the others' writes slow.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
