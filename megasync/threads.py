"""Sync functions of other people, run without holding up an event loop.

A thread cannot be ended: one whose caller has stopped waiting is left alone until its function returns, and counts
against the limit until then. The threads are daemons, so that none keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

# Seconds between two looks for a free thread.
_SLOT_POLL = 0.02


class DaemonThreads:
    """At most `limit` threads at a time, over all event loops of the process; whoever comes later waits."""

    def __init__(self, limit: int) -> None:
        self._slots = threading.BoundedSemaphore(limit)

    async def call(self, function: Callable[..., Any], name: str, /, **arguments: Any) -> Any:
        """What the function returns or raises, from a new thread called `name`."""
        while not self._slots.acquire(blocking=False):
            await asyncio.sleep(_SLOT_POLL)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def tell(value: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        def work() -> None:
            value, raised = None, None
            try:
                value = function(**arguments)
            except (StopIteration, SystemExit, KeyboardInterrupt) as error:
                # A future cannot hold the first one, and the others would end whoever waits for it.
                raised = RuntimeError(f"{type(error).__name__}: {error}")
            except Exception as error:  # noqa: BLE001 - raised again where the function was called
                raised = error
            finally:
                self._slots.release()
            try:
                loop.call_soon_threadsafe(tell, value, raised)
            except RuntimeError:
                log.debug("%s returned after the run had ended", name)

        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError:
            self._slots.release()
            raise
        return await answer
