"""The trajectory buffer in a Ray actor, which survives the death of its process.

`RemoteBuffer` has the methods of `AsyncBuffer`, with the same waits. When the actor's process dies, a new one
continues from the ledger and every unfinished call is made again. That is exactly-once because each call may be
repeated (`buffer.state`) and none is answered before it is recorded (`buffer.durable`). So a process that hangs can be
killed at any moment, and is.

One process, from its start to its death:

    starts ──START_SECONDS──▶ reads its ledger ──OPEN_SECONDS without progress──▶ answers ──ANSWER_SECONDS per call──▶

How long it reads depends on the run, so reading has no total deadline; its progress reports have one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.buffer.state import BufferCounters, BufferCounts, FailedStep
from megasync.cluster.actors import ActorGroup, kill_process
from megasync.cluster.roles import ROLES
from megasync.config.schema import ScheduleConfig
from megasync.errors import LedgerError, ProcessLost
from megasync.trajectory import Group, Partial

T = TypeVar("T")

log = logging.getLogger(__name__)

# More deaths than this within the window have a cause that a new process does not cure.
MAX_DEATHS = 5
WINDOW_SECONDS = 300.0

# Calls that wait for other calls; a wake-up or close() ends them, so they have no deadline.
WAITS = ("admit", "lease", "reclaim")
# Until the first answer: a process has to start, perhaps on a busy machine.
START_SECONDS = 180.0
# Between two different progress reports while the ledger is read. Opening the file may wait for its lock, and may have
# to recover what the previous process left in the write-ahead log.
OPEN_SECONDS = 180.0
# For every other call. A process that has not answered by then is killed and restarted, which loses nothing.
ANSWER_SECONDS = 45.0
# Seconds between two liveness checks while only waiting calls are in flight.
PULSE_SECONDS = 15.0


class RemoteBuffer:
    """`AsyncBuffer` in an actor, with the same arguments. Without a `ledger`, the death of its process ends the run.

    Every call raises what `AsyncBuffer` raises, and LedgerError when the buffer is lost for good.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        total_groups: int | None = None,
        *,
        ledger: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` times the deaths of the process."""
        self._schedule = schedule
        self._total_groups = total_groups
        self._ledger = ledger
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._killed = False
        self._process = self._start()

    async def admit(self, uid: str) -> None:
        await self._call("admit", uid)

    async def commit(self, group: Group) -> bool:
        return await self._call("commit", group)

    async def drop(self, uid: str, reason: str) -> bool:
        return await self._call("drop", uid, reason)

    async def reclaim(self) -> str:
        # One claimant per call: a repeated call gets the group that it may have received already.
        return await self._call("reclaim", uuid.uuid4().hex)

    async def save_partials(self, partials: dict[tuple[str, int, int], Partial]) -> None:
        await self._call("save_partials", partials)

    async def partials(self, uid: str) -> dict[tuple[int, int], Partial]:
        return await self._call("partials", uid)

    async def lease(self, step: int, version: int) -> list[Group]:
        return await self._call("lease", step, version)

    async def ack(self, step: int) -> None:
        await self._call("ack", step)

    async def step_failed(self, step: int, attempts: int, most_in_a_row: int) -> FailedStep:
        return await self._call("step_failed", step, attempts, most_in_a_row)

    async def publish(self, version: int) -> None:
        await self._call("publish", version)

    async def rollback(self, step: int, version: int) -> None:
        await self._call("rollback", step, version)

    async def checkpointed(self, step: int, oldest_kept: int) -> None:
        await self._call("checkpointed", step, oldest_kept)

    async def close(self, reason: str) -> None:
        await self._call("close", reason)

    async def counts(self) -> BufferCounts:
        return await self._call("counts")

    async def counters(self) -> BufferCounters:
        return await self._call("counters")

    async def live_uids(self) -> list[str]:
        return await self._call("live_uids")

    async def waiting(self) -> dict[str, str]:
        return await self._call("waiting")

    def kill(self) -> None:
        """Ends the buffer; calls in flight fail."""
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
                # The first caller that notices the loss starts the next process; the others find it here.
                if self._process is process:
                    self._restart(loss)

    def _restart(self, loss: ProcessLost) -> None:
        if self._ledger is None:
            raise LedgerError(f"{loss}; it had no ledger to restart from") from loss
        now = self._clock()
        if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < WINDOW_SECONDS:
            raise LedgerError(
                f"the buffer was lost {MAX_DEATHS + 1} times within {now - self._deaths[0]:.0f} s; last failure: {loss}"
                f". All finished groups are in {self._ledger}: continue with `megasync resume`"
            ) from loss
        self._deaths.append(now)
        log.warning("%s; restarting it from %s", loss, self._ledger)
        self._process = self._start()

    def _start(self) -> _BufferProcess:
        return _BufferProcess(self._schedule, self._total_groups, self._ledger)


class _BufferProcess:
    """One actor process, on this node, where the ledger is. It starts at once."""

    def __init__(self, schedule: ScheduleConfig, total_groups: int | None, ledger: str | Path | None) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ROLES["buffer"].actor
        remote: Any = ray.remote(actor).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        self._handle = remote.remote(schedule, total_groups, ledger=ledger)
        self._actor = ActorGroup("buffer", [self._handle])
        self._title = actor.__name__
        self._pid: int | None = None
        self._ready: asyncio.Future[None] | None = None
        self._pulse: asyncio.Future[int] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the buffer. Also raises ProcessLost when the process dies or does not answer."""
        await self._wait_until_open()
        if method not in WAITS:
            return await self._actor.call_one(0, method, *arguments, timeout=ANSWER_SECONDS)
        call = asyncio.ensure_future(self._actor.call_one(0, method, *arguments, timeout=None))
        try:
            while not (await asyncio.wait([call], timeout=PULSE_SECONDS))[0]:
                await self._check_pulse()
            return call.result()
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def end(self) -> None:
        """Kills the process, even one that is stopped and receives nothing. Calls in flight fail."""
        if self._pid is not None:
            await asyncio.to_thread(kill_process, self._pid, self._title)
        self.kill()

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)

    async def _wait_until_open(self) -> None:
        """Waits until the ledger is read. Concurrent callers share one wait, and one liveness check below."""
        if self._ready is None:
            self._ready = _shared(self._open())
        await asyncio.shield(self._ready)

    async def _open(self) -> None:
        self._pid = await self._ask_pid(START_SECONDS)
        opened = asyncio.ensure_future(self._actor.call_one(0, "open", timeout=None))
        progress, since = "", time.monotonic()
        try:
            while not (await asyncio.wait([opened], timeout=min(PULSE_SECONDS, OPEN_SECONDS)))[0]:
                last, progress = progress, await self._actor.call_one(0, "opening", timeout=OPEN_SECONDS)
                if progress != last:
                    since = time.monotonic()
                    log.info("buffer: reading its ledger: %s", progress)
                elif time.monotonic() - since >= OPEN_SECONDS:
                    raise ProcessLost(
                        f"the buffer's process made no progress reading its ledger for {OPEN_SECONDS:g} s "
                        f"(read: {progress})"
                    )
            opened.result()
        finally:
            opened.cancel()
            await asyncio.gather(opened, return_exceptions=True)

    async def _check_pulse(self) -> None:
        if self._pulse is None or self._pulse.done():
            self._pulse = _shared(self._ask_pid(ANSWER_SECONDS))
        await asyncio.shield(self._pulse)

    async def _ask_pid(self, seconds: float) -> int:
        try:
            return await self._actor.call_one(0, "__ray_call__", _pid, timeout=seconds)
        except ProcessLost as loss:
            if loss.__cause__ is not None:
                raise
            raise ProcessLost(f"the buffer's process has not answered for {seconds:g} s") from None


def _shared(question: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    asked = asyncio.ensure_future(question)
    # Retrieves the exception in case no caller is left to do so.
    asked.add_done_callback(lambda future: future.cancelled() or future.exception())
    return asked


def _pid(_: Any) -> int:
    return os.getpid()
