"""One process of the buffer, from its start to its death; `cluster.buffer_handle` starts the next one."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.cluster.actors import Actors
from megasync.cluster.leftovers import end_process
from megasync.cluster.roles import ROLES
from megasync.errors import ProcessLost

# These calls wait for others, and end by a wake-up or by close(), which is what the buffer is for.
WAITS = ("admit", "lease", "reclaim")
# Until the first answer: a process has to come up, perhaps on a busy machine.
START_SECONDS = 180.0
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
        self._start: asyncio.Future | None = None
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
        """Waits for the first answer; those that ask at the same time share one question, here and below."""
        if self._pid is None:
            if self._start is None:
                self._start = self._ask(START_SECONDS)
            self._pid = await asyncio.shield(self._start)

    async def _answers(self) -> None:
        if self._pulse is None or self._pulse.done():
            self._pulse = self._ask(ANSWER_SECONDS)
        await asyncio.shield(self._pulse)

    def _ask(self, seconds: float) -> asyncio.Future:
        asked = asyncio.ensure_future(self._question(seconds))
        # Perhaps nobody is left to hear it.
        asked.add_done_callback(lambda future: future.cancelled() or future.exception())
        return asked

    async def _question(self, seconds: float) -> int:
        """The process's id."""
        try:
            return await self._actors.call_one(0, "__ray_call__", _pid, timeout=seconds)
        except ProcessLost as loss:
            if loss.__cause__ is not None:
                raise
            raise ProcessLost(f"the buffer's process has not answered for {seconds:g} s") from None


def _pid(_: Any) -> int:
    return os.getpid()
