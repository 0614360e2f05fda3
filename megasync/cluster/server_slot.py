"""One server of the fleet: its actor, the process in it, and the loops that keep `ServerHealth` informed.

    start ──▶ watch: end · probe · request · check ──(dead)──▶ clean up ──▶ backoff ──▶ restart, with another URL
                                                                    └──▶ retired

`run` is the whole life; it ends when the slot is retired. `on_change` reports each transition to the slot's owner. The
end of a process is detected at once. A process that is alive but silent is detected only by streaks of unanswered
calls, whose deadlines a server easily meets while it runs a long prefill or is paused for a weight sync.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import orjson

from megasync.cluster.gray_failures import CHECK, STREAMED_CHECK, CheckAborted, CheckAnswer, GrayFailures
from megasync.concurrency.tasks import set_within, wait_for_first
from megasync.config import Config
from megasync.errors import InvalidAnswer, MegasyncError, ServerError
from megasync.observe import trace
from megasync.observe.context import RunContext
from megasync.observe.hang import RunProcess
from megasync.observe.state_file import ProcessState
from megasync.rollout.inflight import ServerLoad
from megasync.serving.answers import StreamedError, events
from megasync.serving.control import ServerControl
from megasync.serving.health import ServerHealth, ServerState

log = logging.getLogger(__name__)

# Lines of a dead process's log that go into the reason.
TAIL_LINES = 30
# Seconds between two checks of a server's answers, and between a failed check and its repetition.
CHECK_SECONDS = 60.0
RECHECK_SECONDS = 1.0
# Seconds for a server to finish aborting its requests, which continue elsewhere. It is stopped afterwards in any case.
DRAIN_SECONDS = 10.0
# Seconds between two polls of a server that drains its requests.
_DRAIN_POLL = 0.2
# The golden ratio's fraction: its multiples spread the loops of all slots evenly over a period, however many there are.
_GOLDEN = 0.6180339887


class ServiceProcess(Protocol):
    """The process of a server or router, wherever it runs. Every call but `stop` may raise MegasyncError."""

    async def start(self, timeout: float) -> str:
        """Starts the process and waits until it is ready; returns the URL."""
        ...

    async def ended(self) -> None:
        """Returns when the started process has ended."""
        ...

    async def tail(self, lines: int) -> str: ...

    def processes(self) -> list[tuple[str, int]]:
        """The nodes and ids of the running processes."""
        ...

    async def stop(self, timeout: float) -> None:
        """Ends the process and its actor, whatever state they are in. Does not raise."""


class ServerProcess(ServiceProcess, Protocol):
    """The process of a server."""

    async def visible_devices(self) -> str:
        """The GPUs that it runs on, in the format of CUDA_VISIBLE_DEVICES."""
        ...


class ServerSlot:
    """Runs one server and restarts it. `control` belongs to the current server; None while none runs."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        index: int,
        name: str,
        make_process: Callable[[], ServerProcess],
        make_control: Callable[[str, ServerProcess], ServerControl],
        on_change: Callable[[ServerSlot, ServerState], None],
        peers: GrayFailures | None = None,
        may_start: asyncio.Event | None = None,
    ) -> None:
        """Stores the parts; `start` starts the server.

        Args:
            name: of the server in logs and events.
            make_control: opens a control of the server at a URL, which this process is.
            on_change: called after each transition with the slot and the previous state, while `control` is unchanged.
            peers: compares the server with its peers. Without one its answers are not checked.
            may_start: no process starts while it is not set, because its devices are in use.
        """
        self.index = index
        self.name = name
        self.health = ServerHealth(config.rollout.health, context.clock)
        self.control: ServerControl | None = None
        self.load: ServerLoad | None = None
        self.starts = 0
        self._make_process = make_process
        self._config = config.rollout.health
        self._timeouts = config.timeouts
        self._make_control = make_control
        self._on_change = on_change
        self._process: ServerProcess | None = None
        self._reported = self.health.state
        # Since when it is in this state, in seconds since the epoch.
        self._since = time.time()
        self._peers = peers
        self._reports = context.reports
        self._may_start = may_start
        self._ending = False
        # The control of the server that has released its memory.
        self._released: ServerControl | None = None
        # When a check is due before its time, and the seconds to wait then.
        self._check_due = asyncio.Event()
        self._check_delay = 0.0
        self._phase = (index + 1) * _GOLDEN % 1
        self._wake = asyncio.Event()

    @property
    def url(self) -> str:
        """Empty while no server runs in this slot."""
        return self.control.url if self.control is not None else ""

    def described(self) -> ProcessState:
        """The server, for `state.json`."""
        load = self.load
        return ProcessState(
            name=self.name,
            state=self._reported,
            reason=self.health.reason,
            since=self._since,
            url=self.url,
            starts=self.starts,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            cache_use=load.token_usage if load else None,
            throughput=load.throughput if load else None,
        )

    def note(self, event: Callable[..., None], *arguments: str) -> None:
        """Passes an event, a method of the health machine, to it; reports the transition, if any, to the owner."""
        event(*arguments)
        self._report_change()

    def _report_change(self) -> None:
        state = self.health.state
        if state is self._reported:
            return
        before, self._reported = self._reported, state
        self._since = time.time()
        expected = state in (ServerState.HEALTHY, ServerState.STALE, ServerState.RESTARTING)
        level = logging.INFO if expected else logging.WARNING
        log.log(level, "%s: %s -> %s %s %s", self.name, before, state, self.url, self.health.reason)
        self._wake.set()
        self._on_change(self, before)

    async def start(self) -> None:
        """Starts the process. Raises MegasyncError, and leaves nothing running, when it does not become ready."""
        if self._may_start is not None:
            await self._may_start.wait()
        self.starts += 1
        self._process = self._make_process()
        try:
            url = await self._process.start(self._timeouts.server_start)
        except BaseException:
            await self._end_process()
            raise
        self.control = self._make_control(url, self._process)
        self.note(self.health.started)

    async def run(self) -> None:
        """Watches the started server and restarts it whenever it dies, until the slot is retired."""
        while True:
            if self.health.up:
                await self._watch()
            if self.health.silent:
                await self._reports.report(f"{self.name} does not answer: {self.health.reason}", {self.name})
            await self.close()
            if self.health.state is ServerState.RETIRED:
                return
            wait = self.health.next_restart()
            self._report_change()
            if wait is None:
                return
            await asyncio.sleep(wait)
            self.note(self.health.begin_restart)
            if self.health.state is ServerState.RETIRED:
                return
            try:
                await self.start()
            except MegasyncError as error:
                self.note(self.health.died, str(error))

    def processes(self) -> list[RunProcess]:
        """The running processes of this server."""
        return [RunProcess(self.name, node, pid) for node, pid in self._process.processes()] if self._process else []

    async def visible_devices(self) -> str:
        """The GPUs of the running process. Raises MegasyncError when there is none."""
        if self._process is None:
            raise ServerError(f"{self.name} does not run")
        return await self._process.visible_devices()

    def check_soon(self, seconds: float = 0.0) -> None:
        """Makes the next check due in `seconds`, because some server, perhaps this one, gave an invalid answer."""
        if not self._check_due.is_set():
            self._check_delay = seconds
            self._check_due.set()

    async def drain(self) -> bool:
        """Aborts the running requests, which continue elsewhere from their partial tokens; False when some remain."""
        control = self.control
        deadline = asyncio.get_running_loop().time() + DRAIN_SECONDS
        while control is not None and asyncio.get_running_loop().time() < deadline:
            left = max(_DRAIN_POLL, deadline - asyncio.get_running_loop().time())
            try:
                # Repeated: a request that the router sent before it removed the server may arrive only now.
                await control.post("/abort_request", {"abort_all": True}, timeout=left)
                await asyncio.sleep(_DRAIN_POLL)
                load = ServerLoad.parse(await control.get("/v1/loads?include=core", timeout=left))
            except MegasyncError:
                return False
            if load.running + load.waiting == 0:
                return True
        return False

    # Memory that others use meanwhile

    @property
    def holds_memory(self) -> bool:
        """Whether there is a process, also one that starts or ends, that has not released its memory."""
        released = self.control is not None and self.control is self._released
        return self._ending or (self._process is not None and not released)

    async def release_memory(self, timeout: float) -> None:
        """Frees the device memory of the server; its requests wait. Ends a server that fails to.

        Weights are kept on the host, the cache is lost. Has no effect on a server that has done so already.
        """
        if (control := self.control) is None or control is self._released or not self.health.up:
            return
        self.health.sync_began()
        try:
            # SGLang ends when it is told to release memory while a request runs. Retracted ones are computed again.
            await control.post("/pause_generation", {"mode": "retract"}, timeout)
            await control.post("/release_memory_occupation", {}, timeout)
        except ServerError as error:
            self.note(self.health.mark_dead, f"it did not release its memory: {error}")
        else:
            self._released = control

    async def resume_memory(self, timeout: float) -> None:
        """Undoes `release_memory`; the server generates again. Ends a server that fails to."""
        control, self._released = self._released, None
        if control is None or control is not self.control or not self.health.up:
            return
        try:
            await control.post("/resume_memory_occupation", {}, timeout)
            await control.post("/continue_generation", {"torch_empty_cache": False}, timeout)
        except ServerError as error:
            self.note(self.health.mark_dead, f"it did not get its memory back: {error}")
        finally:
            self.health.sync_ended()

    async def _watch(self) -> None:
        """Returns when the server no longer counts as up."""
        control, process = self.control, self._process
        if control is None or process is None:
            return
        polls = [
            asyncio.create_task(self._await_end(process), name=f"process of {self.name}"),
            asyncio.create_task(self._probe(control), name=f"probe of {self.name}"),
            asyncio.create_task(self._request(control), name=f"request to {self.name}"),
            asyncio.create_task(self._until_down(), name=f"end of {self.name}"),
        ]
        if self._peers is not None:
            polls.append(asyncio.create_task(self._check(control, self._peers), name=f"check of {self.name}"))
        await wait_for_first(*polls)

    async def _until_down(self) -> None:
        while self.health.up:
            self._wake.clear()
            await self._wake.wait()

    async def _await_end(self, process: ServerProcess) -> None:
        try:
            await process.ended()
        except MegasyncError as error:
            self.note(self.health.died, f"it is lost: {error}")
        else:
            self.note(self.health.died, f"its process has ended. Last lines of its log:\n{await self.log_tail()}")

    async def log_tail(self) -> str:
        """The last lines of the process's log."""
        if self._process is None:
            return "(unknown: the process has ended)"
        try:
            return await self._process.tail(TAIL_LINES)
        except MegasyncError as error:
            return f"(unknown: {error})"

    async def _probe(self, control: ServerControl) -> None:
        """Asks the HTTP process for the scheduler's last report, which the in-flight cap uses too."""
        await asyncio.sleep(self._phase * self._config.probe_seconds)
        before = time.time()
        while True:
            try:
                answer = await control.get("/v1/loads?include=core", timeout=self._config.probe_timeout)
                self.load = ServerLoad.parse(answer).after(self.load)
                load, now = self.load, time.time()
                counts = {"running": load.running, "waiting": load.waiting, "cache": round(load.token_usage, 3)}
                busy = load.running + load.waiting > 0
                trace.complete(self.name, "generating" if busy else "idle", before, now, **counts)
                before = now
            except ServerError as error:
                before = time.time()
                self.note(self.health.probe_failed, f"{type(error).__name__}: {error}")
            else:
                self.note(self.health.probe_ok)
                if self._peers is not None and self.health.serves:
                    self._restart_if(self._peers.reported(self.index, self.load))
            await asyncio.sleep(self._config.probe_seconds)

    async def _request(self, control: ServerControl) -> None:
        """Asks for what only the scheduler knows: it has to answer, between two batches and while it is paused too."""
        await asyncio.sleep(self._phase * self._config.request_seconds)
        while True:
            await asyncio.sleep(self._config.request_seconds)
            try:
                await control.get("/server_info", timeout=self._config.request_timeout)
            except ServerError as error:
                self.note(self.health.request_failed, str(error))
            else:
                self.note(self.health.request_ok)

    async def _check(self, control: ServerControl, peers: GrayFailures) -> None:
        """Asks for two tokens and the log-probs of a few, like any request."""
        wait = self._phase * CHECK_SECONDS
        while True:
            if await set_within(self._check_due, wait):
                await asyncio.sleep(self._check_delay)
            wait = CHECK_SECONDS
            self._check_due.clear()
            # A paused server would not answer. Its new weights are checked after the sync.
            if self._settled and await self._check_once(control, peers):
                # Repeats the check soon, because one bad answer is not enough for a verdict.
                self.check_soon(RECHECK_SECONDS)
            await asyncio.sleep(RECHECK_SECONDS)

    async def _check_once(self, control: ServerControl, peers: GrayFailures) -> bool:
        """Checks the server once; returns whether to check again soon."""
        expected, syncs = self._answer_expected, self.health.syncs
        try:
            problem = await self._problem(control, peers)
        except CheckAborted:
            return True
        except ServerError as error:
            if not self._settled or self.health.syncs != syncs:
                return False
            if not (expected and self._answer_expected):
                log.debug("%s: check failed without a verdict: %s", self.name, error)
                peers.outliers.unanswered(self.index)
                return True
            problem = f"it answers probes and its queue is empty, but it does not answer the check: {error}"
        if not self._settled:
            return False
        if problem:
            log.warning("%s: invalid answer: %s", self.name, problem)
        self._restart_if(peers.checked(self.index, problem))
        return problem is not None

    @property
    def _settled(self) -> bool:
        """Whether it serves and no weight sync is in progress."""
        return self.health.serves and not self.health.syncing

    @property
    def _answer_expected(self) -> bool:
        """Whether a missing answer is a fault: probes and requests are answered, and nothing waits in the queue."""
        return self.health.state is ServerState.HEALTHY and self.load is not None and self.load.waiting == 0

    async def _problem(self, control: ServerControl, peers: GrayFailures) -> str | None:
        """What is wrong with the server's answer to `CHECK`.

        Raises ServerError when the answer does not arrive in time, CheckAborted when it was aborted.
        """
        seconds, clock = self._config.request_timeout, asyncio.get_running_loop().time
        answer = CheckAnswer(peers.limits)
        try:
            if not peers.streams:
                answer.add(orjson.dumps(await control.post("/generate", CHECK, seconds)))
                return answer.problem()
            async with asyncio.timeout(seconds) as deadline, control.stream("/generate", STREAMED_CHECK) as response:
                async for piece in events(response, peers.limits.most_bytes):
                    answer.add(piece)
                    # The answer has begun. Empty pieces reveal a stream without an end, but they may come slowly.
                    deadline.reschedule(clock() + max(seconds, CHECK_SECONDS))
                return answer.problem()
        except TimeoutError:
            raise ServerError(f"no complete answer to a check in time, after {answer.tokens} tokens") from None
        except (InvalidAnswer, StreamedError) as error:
            return str(error)

    def _restart_if(self, reason: str | None) -> None:
        if reason is not None:
            self.note(self.health.mark_dead, reason)

    async def close(self) -> None:
        """Ends the process and closes the control. Only `run` starts another."""
        control, self.control, self.load = self.control, None, None
        if control is not None:
            await control.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._ending = True
            try:
                await process.stop(self._timeouts.shutdown)
            finally:
                self._ending = False


def raise_supervision_error(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Raises the error of a task that supervises servers or the router, if one has failed."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, MegasyncError):
                raise error
            raise ServerError(f"internal error in the supervision of {task.get_name()}: {error!r}") from error
