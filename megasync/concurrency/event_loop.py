"""The event loop of a program's main thread: its signals, what blocks it, and its end.

    wait                               ends
    ---------------------------------  -----------------------------------------------------------------------------
    a signal, for the loop             when the loop takes it; after TAKE_SECONDS, what blocks the loop is interrupted
    foreign code that blocks the loop  at `patience`, or for a signal: it is interrupted, and its sample fails
    the end of tasks and generators    after END_SECONDS, and those that are left are named
    the end after a second Ctrl-C      after `last`, when the process ends at once

Invariant: neither foreign code nor a wait keeps a process from its end. A thread of its own (`_Watch`) guarantees it,
because a loop that is blocked cannot. Foreign code that stands at a debugger's prompt does not count as blocking.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from megasync.concurrency.foreign import ForeignExit, Interruption, explain, running_on

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two looks at the loop.
LOOK_SECONDS = 0.5
# Seconds that the loop may take to take a signal.
TAKE_SECONDS = 2.0
# Seconds without a turn of the loop after which the code that blocks it is named.
SLOW_SECONDS = 10.0
# Seconds that all tasks of a loop get to end with it. Longer than a coroutine may take to be cut off (`foreign`).
END_SECONDS = 15.0
# Exit status of a process that was interrupted and did not end on its own.
INTERRUPTED = 130
# Modules of debuggers, of which one is on the stack while a user looks at a breakpoint.
DEBUGGERS = ("bdb", "pdb", "IPython", "debugpy", "pydevd", "ipdb", "pudb")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, whose end is bounded: tasks, generators and threads that refuse to end are named and left.

    A SystemExit that foreign code raises in a callback does not end the loop. Raises ForeignExit for one of `main`.
    """
    loop = asyncio.new_event_loop()
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
    loop.set_default_executor(executor)
    asyncio.set_event_loop(loop)
    try:
        task = loop.create_task(main, name="main")
        while True:
            try:
                return loop.run_until_complete(task)
            except SystemExit as ended:
                if task.done():
                    raise ForeignExit(f"some code raised {explain(ended)}") from ended
                log.error("A callback ended with SystemExit: %s, which is ignored", ended.code)
    finally:
        _end(loop)
        executor.shutdown(wait=False, cancel_futures=True)
        asyncio.set_event_loop(None)
        loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()

    async def ended() -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        generators = asyncio.ensure_future(loop.shutdown_asyncgens())
        await asyncio.wait({generators}, timeout=END_SECONDS)

    loop.run_until_complete(ended())
    if left := [task.get_name() for task in tasks if not task.done()]:
        log.warning("Left %d tasks that did not end within %g s: %s", len(left), END_SECONDS, ", ".join(left[:10]))


@contextmanager
def handle_signals(
    numbers: Sequence[signal.Signals],
    handler: Callable[[signal.Signals], None],
    *,
    patience: float | None = None,
    last: float | None = None,
) -> Iterator[None]:
    """Calls `handler` in the event loop for each signal. No effect outside the main thread, which receives them all.

    Foreign code that blocks the loop is interrupted when a signal waits for it, or after `patience` seconds. `last` is
    how many seconds after its second SIGINT or SIGTERM the process ends at the latest; None for no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(asyncio.get_running_loop(), handler, patience, last)
    before = {number: signal.signal(number, watch.received) for number in numbers}
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        for number, old in before.items():
            signal.signal(number, old)


class _Watch(threading.Thread):
    """Looks at the loop from outside. Its attributes are single values, which signal handlers may set at any moment."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Callable[[signal.Signals], None],
        patience: float | None,
        last: float | None,
    ) -> None:
        super().__init__(name="event loop watch", daemon=True)
        self._loop = loop
        self._handler = handler
        self._patience = patience
        self._last = last
        self._main = threading.get_ident()
        self._over = threading.Event()
        # When the loop had a turn, and whether it was asked for the next.
        self._turn, self._asked = time.monotonic(), False
        # Signals that the loop has not taken, and when the oldest of them came.
        self._waiting, self._since = 0, 0.0
        self._stops = 0
        # When the process ends.
        self._deadline = float("inf")
        # What to tell the code that is interrupted next.
        self._problem = ""

    def received(self, number: int, frame: FrameType | None) -> None:
        """Python's handler of the signals, in the main thread, also while the loop is blocked."""
        if self._problem:
            interruption = Interruption(self._problem)
            interruption.problem, self._problem = self._problem, ""
            if running_on(self._main):
                raise interruption
            return
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        if number in (signal.SIGINT, signal.SIGTERM):
            self._stops += 1
            if self._stops == 2 and self._last is not None:
                self._deadline = time.monotonic() + self._last
        self._loop.call_soon_threadsafe(self._take, signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        self._waiting -= 1
        self._handler(number)

    def stop(self) -> None:
        """Ends the watch. The deadline of the process stays."""
        if self._deadline == float("inf"):
            self._over.set()

    def run(self) -> None:
        warned = False
        while not self._over.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now > self._deadline:
                end_now(INTERRUPTED, "it was interrupted twice")
            if not self._asked:
                self._asked = True
                try:
                    self._loop.call_soon_threadsafe(self._had_a_turn)
                except RuntimeError:  # the loop is closed; a deadline may be left
                    self._turn = float("inf")
                continue
            blocked = now - self._turn
            if blocked < TAKE_SECONDS:
                warned = False
                continue
            what, stack = running_on(self._main), sys._current_frames().get(self._main)
            if what and not _debugged(stack):
                if self._waiting and now - self._since >= TAKE_SECONDS:
                    self._interrupt(f"it blocked the event loop for {blocked:.0f} s when a signal came")
                elif self._patience is not None and blocked >= self._patience:
                    self._interrupt(f"it blocked the event loop for {blocked:.0f} s")
                if blocked >= SLOW_SECONDS and not warned:
                    warned = True
                    log.warning(
                        "The event loop has been blocked for %.0f s by %s, and with it the whole run. Await, or call "
                        "blocking code with asyncio.to_thread. It is here:\n%s",
                        *(blocked, what, "".join(traceback.format_stack(stack)[-3:])),
                    )

    def _had_a_turn(self) -> None:
        self._turn, self._asked = time.monotonic(), False

    def _interrupt(self, problem: str) -> None:
        """Raises an Interruption in the foreign code, also within a system call such as a sleep."""
        self._problem = problem
        signal.pthread_kill(self._main, signal.SIGINT)


def _debugged(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def end_process(status: int, seconds: float) -> None:
    """Makes this process end `seconds` after its main thread, whatever threads, children and exit handlers do."""

    ending = threading.Event()
    # The interpreter calls it first at its end; executors register the waits for their threads in the same way.
    threading._register_atexit(ending.set)  # pyright: ignore[reportAttributeAccessIssue]

    def wait() -> None:
        ending.wait()
        time.sleep(seconds)
        end_now(status, f"what user code left behind kept it for {seconds:g} s after its end")

    threading.Thread(target=wait, name="end of the process", daemon=True).start()


def end_now(status: int, why: str) -> None:
    """Ends this process at once, and says what is left of it."""
    expected = (threading.current_thread(), threading.main_thread())
    names = [t.name for t in threading.enumerate() if t not in expected and not t.daemon]
    left = f"; threads left: {', '.join(names[:10])}" if names else ""
    print(f"megasync ends this process with status {status}: {why}{left}", file=sys.stderr, flush=True)
    os._exit(status)
