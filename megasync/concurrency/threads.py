"""Runs synchronous user functions in daemon threads, so that they never block an event loop.

Each name has a lane: its own FIFO queue and at most `limit` threads, of which `at_once` run calls within their
deadlines; the others are held by calls past theirs. A function that never returns therefore occupies only the threads
of its own lane. Time in the queue does not count: the deadline of a call starts when its function does.

    call     waits for              ends with
    -------  ---------------------  ----------------------------------------
    queued   a thread of its lane   a free thread, or AllThreadsStuck
    running  its function           the function's end, or DeadlineExceeded

Invariant: if calls have deadlines, every wait ends. A running call ends or is abandoned at its deadline. A queued call
checks every `seconds` whether all threads of its lane are abandoned.

Python cannot stop a thread. A thread is abandoned when its caller gives up: it counts against the limit until its
function returns. Threads are daemons, so they do not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from megasync.concurrency.foreign import DeadlineExceeded, invoke

log = logging.getLogger(__name__)

T = TypeVar("T")

# From Linux's <sched.h>: the working directory, root and umask.
_CLONE_FS = 0x200


class AllThreadsStuck(Exception):
    """Every thread of a lane is occupied by a call past its deadline."""


@dataclass(eq=False, slots=True)
class _Call:
    """One call. `begun` and `result` belong to the caller's event loop."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    begun: asyncio.Event
    result: asyncio.Future[Any]
    # The lock of `DaemonThreads` guards these three flags.
    running: bool = False
    ended: bool = False
    abandoned: bool = False


@dataclass(slots=True)
class _Lane:
    """The calls of one name. `queue` holds waiting calls, oldest first; `threads` includes abandoned threads."""

    queue: OrderedDict[_Call, None] = field(default_factory=OrderedDict)
    threads: int = 0
    abandoned: int = 0


class DaemonThreads:
    """Runs calls in at most `limit` threads per name, shared by all event loops of the process.

    `at_once` calls of a name run at the same time; None for as many as there are threads.
    """

    def __init__(self, limit: int, at_once: int | None = None) -> None:
        self._limit = limit
        self._at_once = at_once or limit
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    async def call(self, function: Callable[..., T], name: str, seconds: float | None = None, /, **arguments: Any) -> T:
        """Returns what `function` returns, or raises what it raises, from a thread called `name`.

        Raises DeadlineExceeded `seconds` after the function starts, and AllThreadsStuck if the call is queued while all
        threads of its lane are past their deadlines. A SystemExit and the like become a ForeignExit (`foreign`).
        """
        loop = asyncio.get_running_loop()
        call = _Call(partial(function, **arguments), loop, asyncio.Event(), loop.create_future())
        self._enqueue(name, call)
        try:
            await self._until_begun(name, call, seconds)
            await asyncio.wait({call.result}, timeout=seconds)
            late = not call.result.done()
        finally:
            abandoned = self._leave(name, call)
            # Nobody waits for what it still returns or raises.
            call.result.cancel()
        if not late:
            return call.result.result()
        if abandoned in (1, self._limit):
            log.warning(
                "%s did not return within %g s; %d of its %d threads are held by such calls",
                *(name, seconds, abandoned, self._limit),
            )
        raise DeadlineExceeded(f"{name} did not return within {seconds:g} s")

    async def _until_begun(self, name: str, call: _Call, seconds: float | None) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await call.begun.wait()
            with self._lock:
                if call.running:
                    return
                if self._lanes[name].abandoned < self._limit:
                    continue
            raise AllThreadsStuck(
                f"all {self._limit} threads of {name} are held by calls that did not return within their deadline"
            )

    def _enqueue(self, name: str, call: _Call) -> None:
        """Queues a call and starts a thread for it if the limit allows one more."""
        with self._lock:
            lane = self._lanes.setdefault(name, _Lane())
            lane.queue[call] = None
            self._add_thread(name, lane)

    def _add_thread(self, name: str, lane: _Lane) -> None:
        """Starts a thread for a queued call if the limits allow one more. The caller holds the lock."""
        if lane.threads >= self._limit or lane.threads - lane.abandoned >= self._at_once:
            return
        lane.threads += 1
        try:
            threading.Thread(target=self._work, args=(name, lane), name=name, daemon=True).start()
        except RuntimeError:  # the system has no more threads
            lane.threads -= 1
            if not lane.threads:
                del self._lanes[name]
                raise

    def _leave(self, name: str, call: _Call) -> int:
        """Dequeues a call, or abandons it if it runs. Returns the number of abandoned calls in its lane."""
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None or call.ended:
                return 0
            lane.queue.pop(call, None)
            call.abandoned = call.running
            lane.abandoned += call.running
            if lane.queue:
                self._add_thread(name, lane)
            return lane.abandoned

    def _work(self, name: str, lane: _Lane) -> None:
        """The body of a thread: runs queued calls until the queue is empty."""
        _own_working_directory()
        while (call := self._next(name, lane)) is not None:
            value, raised = None, None
            try:
                value = invoke(call.function)
            except Exception as error:  # noqa: BLE001 - raised again in the caller
                raised = error
            with self._lock:
                call.ended = True
                lane.abandoned -= call.abandoned
            call_on(call.loop, resolve, call.result, value, raised)

    def _next(self, name: str, lane: _Lane) -> _Call | None:
        """Dequeues the oldest call whose loop is still open.

        Returns None if there is none, or if another thread took the place of this one: the thread must end.
        """
        with self._lock:
            while lane.queue and lane.threads - lane.abandoned <= self._at_once:
                call, _ = lane.queue.popitem(last=False)
                if call_on(call.loop, call.begun.set):
                    call.running = True
                    return call
            lane.threads -= 1
            if not lane.threads:
                del self._lanes[name]
            return None


def _own_working_directory() -> None:
    """Gives this thread a working directory of its own, where the system permits it: other threads keep theirs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).unshare(_CLONE_FS)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> bool:
    """Schedules a function on an event loop. Returns False if the loop is closed, so that no caller waits there."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def resolve(result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Ends a future with a value or an error, unless nobody waits for it any more."""
    if result.done():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
