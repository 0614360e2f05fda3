"""One process of the buffer, from its start to its death; `cluster.buffer_handle` starts the next one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.cluster.actors import Actors
from megasync.cluster.leftovers import end_process
from megasync.cluster.roles import ROLES
from megasync.errors import ProcessLost

# These calls wait for others, and end by a wake-up or by close(), which is what the buffer is for.
WAITS = ("admit", "lease", "reclaim")
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
        self._pid = self._handle.__ray_call__.remote(_pid)
        self._pulse: asyncio.Future | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Raises ProcessLost when the process dies or does not answer."""
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
        with contextlib.suppress(RayError):
            # It is there, unless the process has never answered at all.
            if ray.wait([self._pid], timeout=0)[0]:
                await asyncio.to_thread(end_process, ray.get(self._pid), self._title)
        self.kill()

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)

    async def _answers(self) -> None:
        """Those that ask at the same time share one question."""
        if self._pulse is None or self._pulse.done():
            self._pulse = asyncio.ensure_future(self._asked())
        if not await asyncio.shield(self._pulse):
            raise ProcessLost(f"the buffer has not answered for {ANSWER_SECONDS:g} s")

    async def _asked(self) -> bool:
        """A death counts as an answer: the calls that wait hear of it themselves."""
        answer = asyncio.wrap_future(self._handle.__ray_call__.remote(_pid).future())
        done, _ = await asyncio.wait([answer], timeout=ANSWER_SECONDS)
        for future in done:
            future.exception()
        return bool(done)


def _pid(_: Any) -> int:
    return os.getpid()
