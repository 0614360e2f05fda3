"""Runs agents away from the event loop that serves their requests.

An agent may block its event loop, for example by using a sync client inside an `async def`. On the gateway's loop, its
own requests could then never be answered. Async agents therefore share a separate loop on its own thread, and each sync
agent gets a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from megasync.base.importing import name_of
from megasync.concurrency.foreign import DeadlineExceeded, is_async, run
from megasync.concurrency.tasks import cancel_and_wait
from megasync.concurrency.threads import DaemonThreads

# Seconds that cancelled agents have to finish at shutdown.
_CLOSE_SECONDS = 5.0


class AgentLoop:
    """Calls one function, sync or async. At most `threads` sync calls run at once."""

    def __init__(self, function: Callable[..., Any], threads: int) -> None:
        self._function = function
        self._name = f"agent {name_of(function)}"
        self._async = is_async(function)
        self._threads = DaemonThreads(threads)
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None

    async def call(self, seconds: float, /, **arguments: Any) -> Any:
        """Calls the function, and returns or raises what it does. Cancellation reaches async functions only.

        A sync function keeps running on its thread. Raises DeadlineExceeded `seconds` after the function began, and
        AllThreadsStuck when sync calls past their deadline occupy all threads.
        """
        if not self._async:
            return await self._threads.call(self._function, self._name, seconds, **arguments)
        work = run(self._function, self._name, None, **arguments)
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._started()))
        # Cancelled but not awaited: an agent that ignores its cancellation must not block the run.
        try:
            await asyncio.wait({call}, timeout=seconds)
        finally:
            late = not call.done()
            call.cancel()
        if late:
            raise DeadlineExceeded(f"{self._name} did not return within {seconds:g} s")
        return call.result()

    async def close(self) -> None:
        """Cancels the agents, then stops the loop. A loop that an agent blocks is abandoned."""
        if self._running is None:
            return
        (loop, thread), self._running = self._running, None
        ended = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_cancel_all(), loop))
        await asyncio.wait({ended}, timeout=_CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._running is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="agents", daemon=True)
            thread.start()
            self._running = loop, thread
        return self._running[0]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _cancel_all() -> None:
    await cancel_and_wait(*(asyncio.all_tasks() - {asyncio.current_task()}))
