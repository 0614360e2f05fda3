"""The buffer actor, seen as the `AsyncBuffer` that it is: the same methods, with the same waits. It survives its process.

When the process dies, a new one is started that goes on from the ledger, and every call that was under way is made again.
That is exact because each call may be repeated (`buffer.state`) and none is answered before it is recorded
(`buffer.durable`).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.cluster.actors import Actors
from megasync.cluster.roles import ROLES
from megasync.errors import LedgerError, TrainingError

log = logging.getLogger(__name__)

# A buffer that dies more often than this within the window dies of something that a new process does not cure.
MAX_DEATHS = 5
WINDOW_SECONDS = 60.0
# These calls wait for others, and end by a wake-up or by close(), which is what the buffer is for.
WAITS = ("admit", "lease", "reclaim")
# For every other call. A buffer that hangs is not replaced: it may still hold the ledger.
ANSWER_SECONDS = 120.0


class BufferHandle:
    """`options` are the keyword arguments of `AsyncBuffer`; without a `ledger` among them a death ends the run.

    Every call raises what the buffer raises, LedgerError when the buffer died for good, and ProcessLost when it hangs.
    """

    def __init__(self, *arguments: Any, clock: Callable[[], float] = time.monotonic, **options: Any) -> None:
        self._arguments = arguments
        self._options = options
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._killed = False
        self._actors = self._start()

    def __getattr__(self, method: str) -> Any:
        if method not in ROLES["buffer"].methods:
            raise AttributeError(f"the buffer has no method {method!r}")

        async def call(*arguments: Any) -> Any:
            return await self._call(method, *arguments)

        return call

    async def reclaim(self) -> str:
        """One claimant per call: made again, it gets the group that it may have been given already."""
        return await self._call("reclaim", uuid.uuid4().hex)

    def kill(self) -> None:
        """The end: what still waits for an answer fails."""
        self._killed = True
        self._actors.kill()

    async def _call(self, method: str, *arguments: Any) -> Any:
        while True:
            actors = self._actors
            try:
                limit = None if method in WAITS else ANSWER_SECONDS
                return await actors.call_one(0, method, *arguments, timeout=limit)
            except TrainingError as error:
                if self._killed or not isinstance(error.__cause__, RayActorError):
                    raise
                # Whoever notices the death first starts the next one; the others find it here.
                if self._actors is actors:
                    self._replace(error)

    def _replace(self, death: TrainingError) -> None:
        if self._options.get("ledger") is None:
            raise LedgerError(f"{death}; it had no ledger to start again from") from death
        now = self._clock()
        if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < WINDOW_SECONDS:
            raise LedgerError(
                f"the buffer died {MAX_DEATHS + 1} times within {now - self._deaths[0]:.0f} s, the last time so: {death}; "
                f"everything that was finished is in {self._options['ledger']}: `megasync resume` goes on from there"
            ) from death
        self._deaths.append(now)
        log.warning("%s; it goes on from %s", death, self._options["ledger"])
        self._actors = self._start()

    def _start(self) -> Actors:
        """On this node: the ledger lies where the run directory is."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote = ray.remote(ROLES["buffer"].actor).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        return Actors("buffer", [remote.remote(*self._arguments, **self._options)])
