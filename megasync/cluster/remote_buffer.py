"""The trajectory buffer in a Ray actor, which survives the death of its process.

`RemoteBuffer` has the methods of `AsyncBuffer`, with the same waits. When the actor's process dies, a new one
continues from the ledger and every unfinished call is made again. That is exactly-once because each call may be
repeated (`buffer.state`) and none is answered before it is recorded (`buffer.durable`). So a process that hangs can be
killed at any moment, and is.

One process, from its start to its death:

    starts ──START_SECONDS──▶ reads its ledger ──OPEN_SECONDS without progress──▶ answers ──ANSWER_SECONDS per call──▶

How long it reads depends on the run, so reading has no total deadline; its progress reports have one. Once it has read
it, calls go over a socket of this machine (`buffer.link`), and Ray only starts, watches and kills the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megasync.buffer import AsyncBuffer
from megasync.buffer.link import Link
from megasync.cluster.actors import ActorGroup, kill_process
from megasync.cluster.buffer_calls import BufferCalls, LinkedActor
from megasync.cluster.roles import ROLES
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config.schema import ScheduleConfig
from megasync.errors import LedgerError, ProcessLost
from megasync.observe.events import NO_EVENTS, EventSink
from megasync.observe.hang import NO_REPORTS, HangSink, RunProcess

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

# More deaths than this within the window have a cause that a new process does not cure.
MAX_DEATHS = 5
WINDOW_SECONDS = 300.0

# Calls that wait for other calls; a wake-up or close() ends them, so they have no deadline.
WAITS = ("admit", "lease", "reclaim")
# Calls per group, which travel together.
BATCHED = ("admit", "commit", "drop", "reclaim", "save_partials", "partials")
# Until the first answer: a process has to start, perhaps on a busy machine.
START_SECONDS = 180.0
# Between two different progress reports while the ledger is read. Opening the file may wait for its lock, and may have
# to recover what the previous process left in the write-ahead log.
OPEN_SECONDS = 180.0
# For every other call. A process that has not answered by then is killed and restarted, which loses nothing.
ANSWER_SECONDS = 45.0
# Seconds between two liveness checks while only waiting calls are in flight.
PULSE_SECONDS = 15.0


def _in_process(
    method: Callable[Concatenate[AsyncBuffer, P], Awaitable[T]],
) -> Callable[Concatenate[RemoteBuffer, P], CoroutineType[Any, Any, T]]:
    """The same method, called in the buffer's process."""

    @wraps(method)
    async def call(buffer: RemoteBuffer, *args: P.args, **kwargs: P.kwargs) -> T:
        return await buffer._call(method.__name__, *args, **kwargs)

    return call


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
        self.reports: HangSink = NO_REPORTS
        self.events: EventSink = NO_EVENTS
        # Whether the present process has yet to answer a call, after a loss.
        self._recovering = False
        self._followers: list[Callable[[Any], None]] = []
        self._process = self._start()

    admit = _in_process(AsyncBuffer.admit)
    commit = _in_process(AsyncBuffer.commit)
    drop = _in_process(AsyncBuffer.drop)
    save_partials = _in_process(AsyncBuffer.save_partials)
    partials = _in_process(AsyncBuffer.partials)
    unfinished = _in_process(AsyncBuffer.unfinished)
    lease = _in_process(AsyncBuffer.lease)
    ack = _in_process(AsyncBuffer.ack)
    step_failed = _in_process(AsyncBuffer.step_failed)
    publish = _in_process(AsyncBuffer.publish)
    rollback = _in_process(AsyncBuffer.rollback)
    checkpointed = _in_process(AsyncBuffer.checkpointed)
    close = _in_process(AsyncBuffer.close)
    counts = _in_process(AsyncBuffer.counts)
    before_checkpoint = _in_process(AsyncBuffer.before_checkpoint)
    waiting = _in_process(AsyncBuffer.waiting)

    async def reclaim(self) -> str:
        # One claimant per call: a repeated call gets the group that it may have received already.
        return await self._call("reclaim", uuid.uuid4().hex)

    def follow(self, on_start: Callable[[Any], None]) -> None:
        """Calls `on_start` with the Ray handle of the present process, and of each that replaces it."""
        self._followers.append(on_start)
        on_start(self._process.handle)

    def kill(self) -> None:
        """Ends the buffer; calls in flight fail."""
        self._killed = True
        self._process.kill()

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        while True:
            process = self._process
            try:
                result = await process.call(method, *args, **kwargs)
                if self._recovering and process is self._process:
                    self._recovering = False
                    self.events.recovery("buffer", "restarted from its ledger")
                return result
            except ProcessLost as loss:
                if not self._killed and not isinstance(loss.__cause__, RayActorError):
                    await self._report_silence(process, loss)
                    await process.end()
                if self._killed:
                    raise
                # The first caller that notices the loss starts the next process; the others find it here.
                if self._process is process:
                    self._restart(loss)

    async def _report_silence(self, process: _BufferProcess, loss: ProcessLost) -> None:
        """Writes a hang report about a process that is about to be killed; the first of its callers does."""
        if process is self._process and process.report is None:
            process.report = asyncio.ensure_future(self.reports.report(f"buffer: {loss}", {"buffer"}))
        if process.report is not None:
            await asyncio.shield(process.report)

    def processes(self) -> list[RunProcess]:
        """The buffer's process, on this node."""
        pid, node = self._process.pid, ray.get_runtime_context().get_node_id()
        return [] if pid is None else [RunProcess("buffer", node, pid)]

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
        self._recovering = True
        self.events.fault("buffer", str(loss))
        log.warning("%s; restarting it from %s", loss, self._ledger)
        self._process = self._start()
        for on_start in self._followers:
            on_start(self._process.handle)

    def _start(self) -> _BufferProcess:
        return _BufferProcess(self._schedule, self._total_groups, self._ledger)


class _BufferProcess:
    """One actor process on this node, where the ledger is. The constructor starts it."""

    def __init__(self, schedule: ScheduleConfig, total_groups: int | None, ledger: str | Path | None) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ROLES["buffer"].actor
        remote: Any = ray.remote(actor).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        # Ranks on other machines read what this process writes.
        self.handle = remote.remote(schedule, total_groups, ledger=ledger, shared=len(ray.nodes()) > 1)
        self._actor = ActorGroup("buffer", [self.handle])
        self._title = actor.__name__
        self._pid: int | None = None
        self.report: asyncio.Future[Path | None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._pulse: asyncio.Future[int] | None = None
        self._link: Link | None = None
        self._linked: LinkedActor
        self._calls: BufferCalls

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the buffer. Also raises ProcessLost when the process dies or does not answer."""
        # Concurrent callers share one wait for the ledger, and one liveness check.
        if self._ready is None:
            self._ready = _shared(self._open())
        await asyncio.shield(self._ready)
        if method in BATCHED and not kwargs:
            answer = await self._calls.call(method, *args)
            if answer.outcome == "done":
                return answer.value
        elif method not in WAITS:
            return await self._linked.call_one(0, method, *args, **kwargs, timeout=ANSWER_SECONDS)
        waiting = self._linked.call_one(0, method, *args, **kwargs, timeout=None)
        return await _result_with_checks(waiting, PULSE_SECONDS, self._check_pulse)

    @property
    def pid(self) -> int | None:
        """The process id, once it is known."""
        return self._pid

    async def end(self) -> None:
        """Kills the process, even a stopped one. Calls in flight fail."""
        if self._pid is not None:
            await asyncio.to_thread(kill_process, self._pid, self._title)
        self.kill()

    def kill(self) -> None:
        ray.kill(self.handle, no_restart=True)
        if self._link is not None:
            self._link.close()

    async def _open(self) -> None:
        self._pid = await self._ask_pid(START_SECONDS)
        progress, since = "", time.monotonic()

        async def check_progress() -> None:
            nonlocal progress, since
            last, progress = progress, await self._actor.call_one(0, "opening", timeout=OPEN_SECONDS)
            if progress != last:
                since = time.monotonic()
                log.info("Buffer: reading its ledger: %s", progress)
            elif time.monotonic() - since >= OPEN_SECONDS:
                raise ProcessLost(
                    f"the buffer's process made no progress reading its ledger for {OPEN_SECONDS:g} s "
                    f"(read: {progress})"
                )

        opening = self._actor.call_one(0, "open", timeout=None)
        await _result_with_checks(opening, min(PULSE_SECONDS, OPEN_SECONDS), check_progress)
        address = await self._actor.call_one(0, "listen", timeout=ANSWER_SECONDS)
        try:
            self._link = await Link.connect(address)
        except OSError as error:
            raise ProcessLost(f"the buffer's process cannot be reached after it read its ledger: {error}") from error
        self._linked = LinkedActor("buffer", self._link)
        self._calls = BufferCalls(self._linked, ANSWER_SECONDS)

    async def _check_pulse(self) -> None:
        if self._pulse is None or self._pulse.done():
            self._pulse = _shared(self._ask_pid(ANSWER_SECONDS))
        await asyncio.shield(self._pulse)

    async def _ask_pid(self, seconds: float) -> int:
        try:
            return await self._actor.call_one(0, "pid", timeout=seconds)
        except ProcessLost as loss:
            if loss.__cause__ is not None:
                raise
            raise ProcessLost(f"the buffer's process has not answered for {seconds:g} s") from None


async def _result_with_checks(call: Coroutine[Any, Any, T], seconds: float, check: Callable[[], Awaitable[None]]) -> T:
    """The result of `call`. Until it arrives, `check` runs every `seconds`; an error that it raises ends the call."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([task], timeout=seconds))[0]:
            await check()
        return task.result()
    finally:
        await cancel_and_wait(task)


def _shared(call: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    task = asyncio.ensure_future(call)
    # Retrieves the exception in case no caller is left to do so.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
