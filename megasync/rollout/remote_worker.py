"""A worker in another process: the two ends of the connection between driver and worker.

    driver: WorkerLink ──(send: batches of commands, one call at a time)──▶ worker: WorkerEnd ──▶ GroupWorker, client
                 ▲───────(poll: batches of events, one long call at a time)─────────┘

    end      wait           for                                 woken by
    -------  -------------  ----------------------------------  ----------------------------------------------------
    driver   poll           events                              an event, or POLL_SECONDS; a deadline: ProcessLost
    driver   send           commands                            the next command; the same deadline
    driver   `ask`          the answer to a question            the answer; the loss of the worker: ProcessLost
    worker   `enter`        clearance of a suspected prompt     the driver's command

Commands and events are in order. A call either succeeds or loses the worker, which is then killed, so nothing is ever
sent twice. The work per request stays in the worker: the driver handles a few events for each group, and answers polls.

A worker that runs user code on its event loop is busy as long as it answers a poll within the deadline of the calls
(`timeouts.rollout_worker`), and hung afterwards. The same deadline ends a worker that nobody polls: its driver is dead
or has declared it lost, so that it must stop, although whatever it still commits does no harm (`group_worker`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from megasync.concurrency.foreign import explain, invoke
from megasync.concurrency.tasks import cancel_and_wait, set_within, wait_for_first
from megasync.errors import MegasyncError, ProcessLost
from megasync.observe import stacks
from megasync.observe.clock import Reading, read_clock
from megasync.rollout.group_worker import GroupEnded, GroupWorker, Worker, WorkListener
from megasync.rollout.metrics import WorkerStatus
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.remote_quarantine import RemoteQuarantine, TicketDesk
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)

# Seconds after which a poll is answered without an event, with the worker's status.
POLL_SECONDS = 1.0
# Seconds that the first event waits for others: the number of calls does not follow the number of events.
BATCH_SECONDS = 0.02
# Warnings of a worker that the driver's log repeats, per poll. Its own log file has all of them.
LOGS_PER_POLL = 10

# The environment variable that names the worker in everything that it starts.
MARK = "MEGASYNC_ROLLOUT_WORKER"

# A name and its arguments.
Message = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to a poll."""

    status: WorkerStatus
    events: list[Message]


class WorkerProcess(Protocol):
    """A process with a `WorkerEnd`. Every call raises ProcessLost when it died or missed the deadline `timeout`."""

    async def start(self, timeout: float) -> None:
        """Also raises what building the worker raises."""
        ...

    async def poll(self, seconds: float, timeout: float) -> Report: ...
    async def send(self, commands: list[Message], timeout: float) -> None: ...

    def processes(self) -> list[tuple[str, int]]:
        """The node and the id of the process, if it runs."""
        ...

    async def kill(self) -> None:
        """Returns when the process has ended, as far as that can be known."""
        ...


class WorkerEnd:
    """The worker's end. `commands` and `questions` are what the driver may say and ask besides those of the worker."""

    def __init__(
        self,
        worker: GroupWorker,
        outbox: Outbox,
        quarantine: RemoteQuarantine,
        commands: Mapping[str, Callable[..., None]],
        questions: Mapping[str, Callable[..., Awaitable[Any]]],
    ) -> None:
        self._worker = worker
        self._outbox = outbox
        worker.listen(self)
        self._commands: dict[str, Callable[..., None]] = {
            "begin": lambda gated, limit: worker.begin(gated=gated, limit=limit),
            "start": worker.start,
            "set_limit": worker.set_limit,
            "open_gate": worker.open_gate,
            "entered": quarantine.entered,
            "watch": quarantine.watch,
            "ask": self._ask,
            "withdraw": self._withdraw,
            **commands,
        }
        self._questions = {"halt": worker.halt, "close_gate": worker.close_gate, **questions}
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def poll(self, seconds: float) -> Report:
        """Events since the last poll; waits up to `seconds` for the first."""
        events = await self._outbox.take(seconds)
        return Report(self._worker.status, events)

    async def send(self, commands: list[Message]) -> None:
        for name, arguments in commands:
            self._commands[name](*arguments)

    async def close(self) -> None:
        await cancel_and_wait(*self._answering.values())
        await self._worker.halt()

    def answering(self) -> list[asyncio.Task[None]]:
        """The tasks that answer the driver's questions."""
        return list(self._answering.values())

    # `WorkListener` of the worker

    def ended(self, worker: Worker, group: GroupEnded) -> None:
        self._outbox.tell("ended", group)

    def failed(self, worker: Worker, error: BaseException) -> None:
        self._outbox.tell("failed", portable(error))

    def _ask(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        self._answering[number] = asyncio.create_task(self._answer(number, name, arguments), name=f"answer to {name}")

    def _withdraw(self, number: int) -> None:
        if (task := self._answering.pop(number, None)) is not None:
            task.cancel()

    async def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer, error = await self._questions[name](*arguments), None
        except Exception as failure:  # noqa: BLE001 - raised again in the driver
            answer, error = None, portable(failure)
        self._answering.pop(number, None)
        self._outbox.tell("answered", number, answer, error)


class RolloutWorker:
    """A worker's process: the actor of the role `rollout_worker`."""

    def __init__(self) -> None:
        self._end: WorkerEnd

    async def prepare(self, path: Sequence[str], mark: str) -> int:
        """Imports from the driver's `path` too, and marks what this process starts. Returns the process id.

        Called before `open`, whose argument may need modules that only the driver's path has.
        """
        sys.path.extend(folder for folder in path if folder not in sys.path)
        os.environ[MARK] = mark
        stacks.answer(asyncio.get_running_loop())
        return os.getpid()

    async def clock(self) -> Reading:
        """This host, and the time on its clock."""
        return read_clock()

    async def open(self, build: Callable[[float], Awaitable[WorkerEnd]], clock_offset: float) -> None:
        """Raises what building the worker raises, such as a ConfigError for a port that is taken.

        ``clock_offset`` is what to add to this host's clock to get the driver's, in seconds.
        """
        self._end = await build(clock_offset)

    async def poll(self, seconds: float) -> Report:
        return await self._end.poll(seconds)

    async def send(self, commands: list[Message]) -> None:
        await self._end.send(commands)


class Outbox(logging.Handler):
    """The events that wait for the next poll; as a log handler, it adds warnings of the worker's process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._events: list[Message] = []
        self._some = asyncio.Event()
        self._logs = 0
        # When it was polled last, by the clock.
        self.polled = clock()

    def tell(self, name: str, *arguments: Any) -> None:
        self._events.append((name, arguments))
        self._some.set()

    async def take(self, seconds: float) -> list[Message]:
        self.polled = self._clock()
        if not self._events:
            self._some.clear()
            if not await set_within(self._some, seconds):
                return []
        await asyncio.sleep(BATCH_SECONDS)
        events, self._events, self._logs = self._events, [], 0
        return events

    def emit(self, record: logging.LogRecord) -> None:
        """Called on any thread: the event waits for the next poll at most."""
        self._logs += 1
        if self._logs <= LOGS_PER_POLL:
            self._events.append(("log", (record.levelno, self.format(record))))

    async def end_when_abandoned(self, seconds: float) -> None:
        """Ends this process once nobody has polled it for `seconds`."""
        while (left := self.polled + seconds - self._clock()) > 0:  # noqa: ASYNC110 - a deadline that moves
            await asyncio.sleep(left)
        log.error("Nobody has polled this rollout worker for %.0f s, so it ends", seconds)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)


def portable(error: BaseException) -> BaseException:
    """The error, or one with the same text if it cannot be sent to another process."""
    try:
        invoke(lambda: pickle.loads(pickle.dumps(error)))
    except Exception:  # noqa: BLE001 - pickle raises whatever the error's own hooks raise
        return MegasyncError(explain(error))
    return error


class WorkerLink:
    """The driver's end, as rollouter and evaluation use it (`Worker`). `on_invalid_answer` is the client's.

    `patience` is the deadline of a call in seconds, `halt_seconds` that of `halt`.
    """

    def __init__(
        self,
        name: str,
        quarantine: Quarantine,
        on_invalid_answer: Callable[[], None],
        *,
        patience: float,
        halt_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.status = WorkerStatus()
        self._quarantine = quarantine
        self._desk = TicketDesk(quarantine, self._entered, clock)
        self._patience = patience
        self._halt_seconds = halt_seconds
        self._commands: list[Message] = []
        self._some = asyncio.Event()
        self._watched_changed = True
        self._lost: ProcessLost | None = None
        self._count = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._listener: WorkListener
        self._events: dict[str, Callable[..., None]] = {
            "ended": lambda group: self._listener.ended(self, group),
            "failed": lambda error: self._listener.failed(self, error),
            "answered": self._answered,
            "quarantine": self._desk.told,
            "invalid_answer": on_invalid_answer,
            "log": lambda level, text: log.log(level, "%s: %s", self.name, text),
        }

    # `Worker`

    def listen(self, listener: WorkListener) -> None:
        self._listener = listener

    def begin(self, *, gated: bool, limit: int | None) -> None:
        self.tell("begin", gated, limit)

    def start(self, prompt: Prompt, batch: int, again: bool = False) -> None:
        self.tell("start", prompt, batch, again)

    def set_limit(self, limit: int) -> None:
        self.tell("set_limit", limit)

    async def close_gate(self, timeout: float) -> None:
        await self.ask("close_gate", timeout)

    def open_gate(self) -> None:
        self.tell("open_gate")

    def halt(self) -> Coroutine[Any, Any, None]:
        return self._halt()

    async def _halt(self) -> None:
        try:
            async with asyncio.timeout(self._halt_seconds):
                await self.ask("halt")
        except (ProcessLost, TimeoutError) as error:
            log.warning("%s did not halt; its latest partial responses are generated again: %r", self.name, error)

    # Commands and questions

    def tell(self, name: str, *arguments: Any) -> None:
        """Sends a command. The order of commands is kept."""
        self._commands.append((name, arguments))
        self._some.set()

    async def ask(self, name: str, *arguments: Any) -> Any:
        """The worker's answer. Raises what the worker raised, and ProcessLost when it is lost before."""
        if self._lost is not None:
            raise ProcessLost(str(self._lost))
        self._count += 1
        number = self._count
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.tell("ask", number, name, arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            self.tell("withdraw", number)
            raise
        finally:
            del self._asked[number]

    def lose(self, loss: ProcessLost) -> None:
        """Ends what waits for the worker."""
        self._lost = loss
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ProcessLost(str(loss)))
        self._desk.close()

    # The connection

    async def run(self, process: WorkerProcess) -> None:
        """Exchanges commands and events until the process is lost: raises ProcessLost."""
        self._quarantine.follow(self._watch)
        try:
            await wait_for_first(
                asyncio.create_task(self._poll_loop(process), name=f"{self.name}: poll"),
                asyncio.create_task(self._send_loop(process), name=f"{self.name}: send"),
            )
        finally:
            self._quarantine.unfollow(self._watch)

    async def _poll_loop(self, process: WorkerProcess) -> None:
        while True:
            report = await process.poll(POLL_SECONDS, POLL_SECONDS + self._patience)
            self.status = report.status
            for name, arguments in report.events:
                self._events[name](*arguments)

    async def _send_loop(self, process: WorkerProcess) -> None:
        while True:
            if self._watched_changed:
                self._watched_changed = False
                self.tell("watch", self._quarantine.watched())
            commands, self._commands = self._commands, []
            self._some.clear()
            await process.send(commands, self._patience)
            await self._some.wait()

    def _watch(self) -> None:
        self._watched_changed = True
        self._some.set()

    def _entered(self, number: int, url: str | None, poison: str | None) -> None:
        self.tell("entered", number, url, poison)

    def _answered(self, number: int, answer: Any, error: BaseException | None) -> None:
        waiting = self._asked.get(number)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(answer)
        else:
            waiting.set_exception(error)
