"""Sync functions of other people, run without holding up an event loop.

Each name has a lane: its own threads, at most `limit` of them, and its own queue, first come first served. So a function
that never returns takes up the threads of its own lane and of no other. Queue time is not run time: the deadline of a call
begins when its function does, and a thread that becomes free takes the next call from the queue itself.

    waits          for                    who ends the wait
    -------------  ---------------------  -----------------------------------------------------------
    a queued call  a thread of its lane   the thread that becomes free, or AllStuck
    a running one  its function           the function, or Late

Invariant: no wait is without an end where calls have deadlines. A running call ends or becomes abandoned at its deadline,
and a queued one looks, once every `seconds`, whether all threads of its lane are abandoned.

A thread cannot be ended: one whose caller has stopped waiting is abandoned until its function returns, and counts against
the limit until then. The threads are daemons, so that none keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

log = logging.getLogger(__name__)


class Late(Exception):
    """A function did not return within its deadline; a TimeoutError would also be what it raised itself."""


class AllStuck(Exception):
    """Every thread of a function is held by a call past its deadline."""


@dataclass(eq=False, slots=True)
class _Work:
    """One call. Its loop learns of the beginning and of the end."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    begun: asyncio.Event
    answer: asyncio.Future[Any]
    # All three under the lock of `DaemonThreads`.
    running: bool = False
    ended: bool = False
    abandoned: bool = False


@dataclass(slots=True)
class _Lane:
    """`queue` holds calls without a thread, the oldest first; `threads` counts those that run, abandoned ones included."""

    queue: OrderedDict[_Work, None] = field(default_factory=OrderedDict)
    threads: int = 0
    abandoned: int = 0


class DaemonThreads:
    """At most `limit` threads for each name, over all event loops of the process."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    async def call(
        self, function: Callable[..., Any], name: str, seconds: float | None = None, /, **arguments: Any
    ) -> Any:
        """What the function returns or raises, from a thread called `name`.

        Raises Late `seconds` after the function began, and AllStuck after a wait for threads that are all past their
        deadline. An exception that is no Exception arrives as a RuntimeError, for it would end whoever waits for it.
        """
        loop = asyncio.get_running_loop()
        work = _Work(partial(function, **arguments), loop, asyncio.Event(), loop.create_future())
        self._add(name, work)
        try:
            await self._turn(name, work, seconds)
            await asyncio.wait({work.answer}, timeout=seconds)
            late = not work.answer.done()
        finally:
            abandoned = self._leave(name, work)
        if not late:
            return work.answer.result()
        if abandoned in (1, self._limit):
            log.warning(
                "%s did not return within %g s; %d of its %d threads are held by such calls",
                *(name, seconds, abandoned, self._limit),
            )
        raise Late(f"{name} did not return within {seconds:g} s")

    async def _turn(self, name: str, work: _Work, seconds: float | None) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await work.begun.wait()
            with self._lock:
                if work.running:
                    return
                if self._lanes[name].abandoned < self._limit:
                    continue
            raise AllStuck(
                f"all {self._limit} threads of {name} are held by calls that did not return within their deadline"
            )

    def _add(self, name: str, work: _Work) -> None:
        """Queues a call, and starts a thread for it where the limit allows one."""
        with self._lock:
            lane = self._lanes.setdefault(name, _Lane())
            lane.queue[work] = None
            if lane.threads >= self._limit:
                return
            lane.threads += 1
            try:
                threading.Thread(target=self._serve, args=(name, lane), name=name, daemon=True).start()
            except RuntimeError:  # the system has no more threads
                lane.threads -= 1
                if not lane.threads:
                    del self._lanes[name]
                    raise

    def _leave(self, name: str, work: _Work) -> int:
        """Takes a call out of the queue, or abandons it where it runs. Returns how many of its lane are abandoned."""
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None or work.ended:
                return 0
            lane.queue.pop(work, None)
            work.abandoned = work.running
            lane.abandoned += work.running
            return lane.abandoned

    def _serve(self, name: str, lane: _Lane) -> None:
        """Runs what is queued, and ends when nothing is."""
        while (work := self._next(name, lane)) is not None:
            value, raised = None, None
            try:
                value = work.function()
            except (StopIteration, asyncio.CancelledError) as error:
                # A future cannot hold the first one; the second would look like a cancellation of who waits.
                raised = RuntimeError(f"{type(error).__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - raised again where the function was called
                raised = error
            except BaseException as error:  # noqa: BLE001 - SystemExit and its like would end who waits
                raised = RuntimeError(f"{type(error).__name__}: {error}")
            with self._lock:
                work.ended = True
                lane.abandoned -= work.abandoned
            _tell(work.loop, _settle, work.answer, value, raised)

    def _next(self, name: str, lane: _Lane) -> _Work | None:
        with self._lock:
            while lane.queue:
                work, _ = lane.queue.popitem(last=False)
                if _tell(work.loop, work.begun.set):
                    work.running = True
                    return work
            lane.threads -= 1
            if not lane.threads:
                del self._lanes[name]
            return None


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Calls a function on a loop; False where the loop is closed, so that nobody waits there."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def _settle(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
