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
import ctypes
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
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from megasync.concurrency.foreign import ForeignExit, Interruption, Stretch, explain, running_on

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two looks at the loop.
LOOK_SECONDS = 0.5
# Seconds that a signal may wait for code that blocks the loop.
TAKE_SECONDS = 2.0
# Seconds that code blocks the loop until it is named.
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
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        # It would end the process, and code in a thread can set an alarm, but no handler.
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, watch.alarmed)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        for number, old in before.items():
            signal.signal(number, old)


def ignore_alarms() -> None:
    """Has this process ignore alarms, which would end it, unless Python code handles them. Any thread may call it."""
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        # Python sets handlers in the main thread only, which may belong to Ray.
        ctypes.CDLL(None).signal(int(signal.SIGALRM), ctypes.c_void_p(int(signal.SIG_IGN)))


class _Watch(threading.Thread):
    """Looks at the loop from outside. Its attributes are single values, which signal handlers may set at any moment.

    On a busy machine, many short calls can fill a turn of the loop, and a call can wait for a core or for Python's
    lock. That is not blocking. The watch therefore adds up the time of one call alone (a `Stretch` of foreign code),
    without what its thread waited for a core, and at most LOOK_SECONDS for each look, because a process that gets no
    core does not look either.
    """

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
        self._main, self._main_id = threading.get_ident(), threading.get_native_id()
        self._over = threading.Event()
        # Signals that the loop has not taken, and when the oldest of them came.
        self._waiting, self._since = 0, 0.0
        self._stops = 0
        # When the process ends.
        self._deadline = float("inf")
        # The code to interrupt, and what to tell it.
        self._blocking: tuple[Stretch, str] | None = None

    def received(self, number: int, frame: FrameType | None) -> None:
        """Python's handler of the signals, in the main thread, also while the loop is blocked."""
        if self._blocking:
            (code, problem), self._blocking = self._blocking, None
            if running_on(self._main) is code:
                interruption = Interruption(problem)
                interruption.problem = problem
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

    def alarmed(self, number: int, frame: FrameType | None) -> None:
        """Python's handler of alarms, of which the run sets none."""
        message = (
            "Ignored an alarm that some code set in a thread; with rollout.reward_processes rewards may set alarms"
        )
        self._loop.call_soon_threadsafe(log.warning, message)

    def _take(self, number: signal.Signals) -> None:
        self._waiting -= 1
        self._handler(number)

    def stop(self) -> None:
        """Ends the watch. The deadline of the process stays."""
        if self._deadline == float("inf"):
            self._over.set()

    def run(self) -> None:
        code, blocked, warned = None, 0.0, False
        now, starved = time.monotonic(), _starved(self._main_id)
        while not self._over.wait(LOOK_SECONDS):
            looked, now, waited, starved = now, time.monotonic(), starved, _starved(self._main_id)
            if now > self._deadline:
                end_now(INTERRUPTED, "it was interrupted twice")
            before, code = code, running_on(self._main)
            stack = sys._current_frames().get(self._main)
            if code is None or code is not before or _debugged(stack):
                blocked, warned = 0.0, False
                continue
            blocked += min(LOOK_SECONDS, now - looked - (starved - waited))
            if blocked >= SLOW_SECONDS and not warned:
                warned = True
                log.warning(
                    "The event loop has been blocked for %.0f s by %s, and with it the whole run. Await, or call "
                    "blocking code with asyncio.to_thread. It is here:\n%s",
                    *(blocked, code.name, "".join(traceback.format_stack(stack)[-3:])),
                )
            if self._waiting and min(blocked, now - self._since) >= TAKE_SECONDS:
                self._interrupt(code, f"it blocked the event loop for {blocked:.0f} s when a signal came")
            elif self._patience is not None and blocked >= self._patience:
                self._interrupt(code, f"it blocked the event loop for {blocked:.0f} s")

    def _interrupt(self, code: Stretch, problem: str) -> None:
        """Raises an Interruption in the foreign code, also within a system call such as a sleep."""
        self._blocking = code, problem
        signal.pthread_kill(self._main, signal.SIGINT)


def _starved(thread: int) -> float:
    """Seconds that a thread was ready to run and had no core; 0 where the system does not count them."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


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
