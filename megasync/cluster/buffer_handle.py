"""The buffer actor, seen as the `AsyncBuffer` that it is: the same methods, with the same waits. It survives its process.

When the process dies, a new one is started that goes on from the ledger, and every call that was under way is made again.
That is exact because each call may be repeated (`buffer.state`) and none is answered before it is recorded
(`buffer.durable`). For the same reason a process that hangs can be killed at any moment, and is.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from megasync.cluster.buffer_process import BufferProcess
from megasync.cluster.roles import ROLES
from megasync.errors import LedgerError, ProcessLost

log = logging.getLogger(__name__)

# A buffer that is lost more often than this within the window is lost to something that a new process does not cure.
MAX_DEATHS = 5
WINDOW_SECONDS = 300.0


class BufferHandle:
    """`options` are the keyword arguments of `AsyncBuffer`; without a `ledger` among them a death ends the run.

    Every call raises what the buffer raises, and LedgerError when the buffer is lost for good.
    """

    def __init__(self, *arguments: Any, clock: Callable[[], float] = time.monotonic, **options: Any) -> None:
        self._arguments = arguments
        self._options = options
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._killed = False
        self._process = self._start()

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
        self._process.kill()

    async def _call(self, method: str, *arguments: Any) -> Any:
        while True:
            process = self._process
            try:
                return await process.call(method, *arguments)
            except ProcessLost as loss:
                if not self._killed and not isinstance(loss.__cause__, RayActorError):
                    await process.end()
                if self._killed:
                    raise
                # Whoever notices the loss first starts the next one; the others find it here.
                if self._process is process:
                    self._replace(loss)

    def _replace(self, loss: ProcessLost) -> None:
        if self._options.get("ledger") is None:
            raise LedgerError(f"{loss}; it had no ledger to start again from") from loss
        now = self._clock()
        if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < WINDOW_SECONDS:
            raise LedgerError(
                f"the buffer was lost {MAX_DEATHS + 1} times within {now - self._deaths[0]:.0f} s, the last time so: "
                f"{loss}; everything that was finished is in {self._options['ledger']}: `megasync resume` goes on from there"
            ) from loss
        self._deaths.append(now)
        log.warning("%s; it goes on from %s", loss, self._options["ledger"])
        self._process = self._start()

    def _start(self) -> BufferProcess:
        return BufferProcess(*self._arguments, **self._options)
