"""One process of the buffer, from its start to its death; `cluster.buffer_handle` starts the next one.

    comes up ──START_SECONDS──▶ reads its ledger ──OPEN_SECONDS without progress──▶ answers ──ANSWER_SECONDS a call──▶

How long the reading takes depends on the run, so it has no deadline of its own, but each report of its progress has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.cluster.actors import Actors
from megasync.cluster.leftovers import end_process
from megasync.cluster.roles import ROLES
from megasync.errors import ProcessLost

log = logging.getLogger(__name__)

# These calls wait for others, and end by a wake-up or by close(), which is what the buffer is for.
WAITS = ("admit", "lease", "reclaim")
# Until the first answer: a process has to come up, perhaps on a busy machine.
START_SECONDS = 180.0
# While it reads its ledger: between two reports that differ. Opening the file alone may wait for its lock, and take over
# what the process before it left in the log.
OPEN_SECONDS = 180.0
# For every other call. A process that has not answered by then is ended, which costs nothing, and started again.
ANSWER_SECONDS = 45.0
# While nothing but waits is under way, so often the process is asked whether it is there.
PULSE_SECONDS = 15.0


class BufferProcess:
    """The actor, on this node, where the ledger lies. Starts when it is made; every call raises what the buffer raises."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ROLES["buffer"].actor
        remote = ray.remote(actor).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        self._handle = remote.remote(*arguments, **options)
        self._actors = Actors("buffer", [self._handle])
        self._title = actor.__name__
        self._pid: int | None = None
        self._ready: asyncio.Future | None = None
        self._pulse: asyncio.Future | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises ProcessLost when the process dies or does not answer."""
        await self._up()
        if method not in WAITS:
            return await self._actors.call_one(0, method, *arguments, timeout=ANSWER_SECONDS)
        call = asyncio.ensure_future(self._actors.call_one(0, method, *arguments, timeout=None))
        try:
            while not (await asyncio.wait([call], timeout=PULSE_SECONDS))[0]:
                await self._answers()
            return call.result()
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def end(self) -> None:
        """Also of a process that was stopped, and hears nothing. What still waits for an answer fails."""
        if self._pid is not None:
            await asyncio.to_thread(end_process, self._pid, self._title)
        self.kill()

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)

    async def _up(self) -> None:
        """Waits until its ledger is read; those that ask at the same time share one question, here and below."""
        if self._ready is None:
            self._ready = _shared(self._begin())
        await asyncio.shield(self._ready)

    async def _begin(self) -> None:
        self._pid = await self._question(START_SECONDS)
        opened = asyncio.ensure_future(self._actors.call_one(0, "open", timeout=None))
        progress, since = "", time.monotonic()
        try:
            while not (await asyncio.wait([opened], timeout=min(PULSE_SECONDS, OPEN_SECONDS)))[0]:
                last, progress = progress, await self._actors.call_one(0, "opening", timeout=OPEN_SECONDS)
                if progress != last:
                    since = time.monotonic()
                    log.info("the buffer reads its ledger: %s", progress)
                elif time.monotonic() - since >= OPEN_SECONDS:
                    raise ProcessLost(
                        f"the buffer's process has not read on in its ledger for {OPEN_SECONDS:g} s (read: {progress})"
                    )
            opened.result()
        finally:
            opened.cancel()
            await asyncio.gather(opened, return_exceptions=True)

    async def _answers(self) -> None:
        if self._pulse is None or self._pulse.done():
            self._pulse = _shared(self._question(ANSWER_SECONDS))
        await asyncio.shield(self._pulse)

    async def _question(self, seconds: float) -> int:
        """The process's id."""
        try:
            return await self._actors.call_one(0, "__ray_call__", _pid, timeout=seconds)
        except ProcessLost as loss:
            if loss.__cause__ is not None:
                raise
            raise ProcessLost(f"the buffer's process has not answered for {seconds:g} s") from None


def _shared(question: Coroutine[Any, Any, Any]) -> asyncio.Future:
    asked = asyncio.ensure_future(question)
    # Perhaps nobody is left to hear it.
    asked.add_done_callback(lambda future: future.cancelled() or future.exception())
    return asked


def _pid(_: Any) -> int:
    return os.getpid()
