"""The connection between the driver and a rollout worker, on the driver's event loop or in a process of its own.

    driver: WorkerLink ──(commands, questions, answers)──▶ worker: WorkerEnd ──▶ GroupWorker, client
                 ▲─────────(events, questions, answers)─────────┘

    with            messages are                                       waits, and what ends them
    --------------  -------------------------------------------------  --------------------------------------------
    LocalProcess    calls on the same event loop, with the objects     none
                    themselves
    RemoteProcess   pickled batches: `send` takes them to the worker,  a poll by an event or POLL_SECONDS, either by
                    `poll` brings them back, one call of each at a     its deadline: ProcessLost
                    time

Messages are in order. A call to a process either succeeds or loses the worker, which is then killed, so nothing is ever
sent twice; questions to a lost worker end with ProcessLost. The work per request stays in the worker: the driver
handles a few messages for each group, and answers polls.

A remote worker that runs user code on its event loop is busy as long as it answers a poll within the deadline of the
calls (`timeouts.rollout_worker`), and hung afterwards. The same deadline ends a worker that nobody polls: its driver is
dead or has declared it lost, so that it must stop, although whatever it still commits does no harm (`group_worker`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from megasync.concurrency.foreign import explain, invoke
from megasync.concurrency.tasks import set_within, wait_for_first
from megasync.errors import MegasyncError, ProcessLost
from megasync.observe import stacks
from megasync.observe.clock import Reading, read_clock
from megasync.rollout.group_worker import GroupWorker
from megasync.rollout.metrics import WorkerStatus
from megasync.rollout.selection import GroupEnded
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
Commands = Mapping[str, Callable[..., None]]
Questions = Mapping[str, Callable[..., Awaitable[Any]]]


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to a poll."""

    status: WorkerStatus
    events: list[Message]


class Channel:
    """One end of a connection: says messages to the other end, and handles those from there.

    `commands` handle messages by name, `questions` answer. `send` takes a message to the other end's `receive`.
    """

    def __init__(self, name: str) -> None:
        """`name` is that of the other end."""
        self.name = name
        self.send: Callable[[Message], None]
        self.commands: dict[str, Callable[..., None]] = {
            "ask": self._asked_for,
            "withdraw": self._withdraw,
            "answer": self._answered,
        }
        self.questions: dict[str, Callable[..., Awaitable[Any]]] = {}
        self._lost: ProcessLost | None = None
        self._count = 0
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}

    def receive(self, message: Message) -> None:
        name, arguments = message
        self.commands[name](*arguments)

    def tell(self, name: str, *arguments: Any) -> None:
        """Says a message. The order of messages and questions is kept."""
        self.send((name, arguments))

    async def ask(self, name: str, *arguments: Any) -> Any:
        """The other end's answer. Raises what it raised, and ProcessLost when it is lost before."""
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
        """Ends what waits for the other end, and what works for it."""
        self._lost = loss
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ProcessLost(str(loss)))
        for task in self.answering():
            task.cancel()

    def answering(self) -> list[asyncio.Task[None]]:
        """The tasks that answer the other end's questions."""
        return list(self._answering.values())

    def _asked_for(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        task = asyncio.create_task(self._answer(number, name, arguments), name=f"{name} for {self.name}")
        self._answering[number] = task
        task.add_done_callback(lambda _: self._answering.pop(number, None))

    def _withdraw(self, number: int) -> None:
        if (task := self._answering.pop(number, None)) is not None:
            task.cancel()

    async def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer, error = await self.questions[name](*arguments), None
        except Exception as failure:  # noqa: BLE001 - raised again at the other end
            answer, error = None, failure
        self.tell("answer", number, answer, error)

    def _answered(self, number: int, answer: Any, error: BaseException | None) -> None:
        waiting = self._asked.get(number)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(answer)
        else:
            waiting.set_exception(error)


class WorkerEnd(Channel):
    """The worker's end. Its parts may use it before it serves their `GroupWorker`."""

    def __init__(self) -> None:
        super().__init__("the driver")
        self._worker: GroupWorker

    def serve(self, worker: GroupWorker, commands: Commands, questions: Questions) -> None:
        """Lets the driver use a worker. It may say and ask more: `commands` and `questions`."""
        self._worker = worker
        gate = worker.gate
        self.commands |= {"begin": worker.begin, "start": worker.start, **commands}
        self.commands |= {"set_limit": gate.set_limit, "open_gate": gate.open}
        self.questions |= {"halt": worker.halt, "close_gate": gate.close, **questions}

    @property
    def status(self) -> WorkerStatus:
        return self._worker.status

    def abandon(self) -> None:
        """Cancels whatever runs, without waiting for it: nothing is saved or reported anymore."""
        for task in self.answering():
            task.cancel()
        self._worker.abandon()


class WorkerLink(Channel):
    """The driver's end, as rollouter and evaluation use it: its methods are those of `GroupWorker` and its gate.

    The worker may say and ask more: `commands` and `questions`. `halt_seconds` is the deadline of `halt`.
    """

    def __init__(self, name: str, commands: Commands, questions: Questions, halt_seconds: float) -> None:
        super().__init__(name)
        # Has the latest known status.
        self.source: WorkerEnd | Report = Report(WorkerStatus(), [])
        self._halt_seconds = halt_seconds
        self.commands |= {"log": lambda level, text: log.log(level, "%s: %s", self.name, text), **commands}
        self.questions |= questions

    @property
    def status(self) -> WorkerStatus:
        """The latest known."""
        return self.source.status

    def follow(self, on_ended: Callable[[GroupEnded], None], on_failed: Callable[[BaseException], None]) -> None:
        """Calls these as the worker does; see `GroupWorker`."""
        self.commands |= {"ended": on_ended, "failed": on_failed}

    def begin(self, gated: bool, limit: int | None) -> None:
        self.tell("begin", gated, limit)

    def start(self, prompt: Prompt, batch: int, again: bool = False) -> None:
        self.tell("start", prompt, batch, again)

    def set_limit(self, limit: int) -> None:
        self.tell("set_limit", limit)

    async def close_gate(self, timeout: float) -> None:
        await self.ask("close_gate", timeout)

    def open_gate(self) -> None:
        self.tell("open_gate")

    async def halt(self) -> None:
        try:
            async with asyncio.timeout(self._halt_seconds):
                await self.ask("halt")
        except (ProcessLost, TimeoutError) as error:
            log.warning("%s did not halt; its latest partial responses are generated again: %r", self.name, error)


def join(link: WorkerLink, end: WorkerEnd) -> None:
    """Connects the ends of a worker on this event loop: every message is a call."""
    link.send, end.send, link.source = end.receive, link.receive, end


class WorkerProcess(Protocol):
    """Where a worker runs: a `RemoteProcess` or a `LocalProcess`."""

    async def start(self, timeout: float) -> None:
        """Raises ProcessLost when the process died or missed the deadline, and what building the worker raises."""
        ...

    def connect(self, link: WorkerLink, patience: float) -> Coroutine[Any, Any, Any]:
        """Takes the link's messages from now on. The coroutine delivers them until it raises ProcessLost.

        `patience` is the deadline of a call in seconds.
        """
        ...

    def processes(self) -> list[tuple[str, int]]:
        """The node and the id of the worker's own process, if it has one that runs."""
        ...

    async def kill(self) -> None:
        """Returns when the worker has ended, as far as that can be known."""
        ...


class LocalProcess:
    """A worker on the driver's event loop: messages are calls. It is neither watched nor lost."""

    def __init__(self, build: Callable[[], WorkerEnd]) -> None:
        self._build = build
        self._end: WorkerEnd | None = None

    async def start(self, timeout: float) -> None:
        self._end = self._build()

    def connect(self, link: WorkerLink, patience: float) -> Coroutine[Any, Any, Any]:
        assert self._end is not None
        join(link, self._end)
        return asyncio.Event().wait()

    def processes(self) -> list[tuple[str, int]]:
        return []

    async def kill(self) -> None:
        if self._end is not None:
            self._end.abandon()


class RemoteProcess(ABC):
    """A worker in another process, with a `PolledEnd`."""

    @abstractmethod
    async def poll(self, seconds: float, timeout: float) -> Report:
        """Raises ProcessLost when the process died or missed the deadline `timeout`, as does `send`."""

    @abstractmethod
    async def send(self, commands: list[Message], timeout: float) -> None: ...

    def connect(self, link: WorkerLink, patience: float) -> Coroutine[Any, Any, Any]:
        """Connects the link to the worker's process; see `WorkerProcess.connect`."""
        unsent: list[Message] = []
        some = asyncio.Event()

        def put(message: Message) -> None:
            unsent.append(_portable_message(message))
            some.set()

        async def poll_loop() -> None:
            while True:
                report = await self.poll(POLL_SECONDS, POLL_SECONDS + patience)
                link.source = report
                for message in report.events:
                    link.receive(message)

        async def send_loop() -> None:
            while await some.wait():
                some.clear()
                commands = unsent.copy()
                unsent.clear()
                await self.send(commands, patience)

        async def run() -> None:
            await wait_for_first(
                asyncio.create_task(poll_loop(), name=f"{link.name}: poll"),
                asyncio.create_task(send_loop(), name=f"{link.name}: send"),
            )

        link.send = put
        return run()


class PolledEnd(logging.Handler):
    """The side of a `RemoteProcess` in the worker's process: what `end` says waits here for the next poll.

    As a log handler, it adds warnings of the process.
    """

    def __init__(self, end: WorkerEnd, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self.end = end
        self._clock = clock
        self._events: list[Message] = []
        self._some = asyncio.Event()
        self._logs = 0
        # When it was polled last, by the clock.
        self.polled = clock()
        end.send = self._put

    async def poll(self, seconds: float) -> Report:
        """Events since the last poll; waits up to `seconds` for the first."""
        self.polled = self._clock()
        if not self._events:
            self._some.clear()
        if self._events or await set_within(self._some, seconds):
            await asyncio.sleep(BATCH_SECONDS)
        events, self._events, self._logs = self._events, [], 0
        return Report(self.end.status, events)

    async def send(self, commands: list[Message]) -> None:
        for message in commands:
            self.end.receive(message)

    def _put(self, message: Message) -> None:
        self._events.append(_portable_message(message))
        self._some.set()

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


class RolloutWorker:
    """The actor of the role `rollout_worker`: a process with a `PolledEnd`."""

    def __init__(self) -> None:
        self._polled: PolledEnd

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

    async def open(self, build: Callable[[float], Awaitable[PolledEnd]], clock_offset: float) -> None:
        """Raises what building the worker raises, such as a ConfigError for a port that is taken.

        ``clock_offset`` is what to add to this host's clock to get the driver's, in seconds.
        """
        self._polled = await build(clock_offset)

    async def poll(self, seconds: float) -> Report:
        return await self._polled.poll(seconds)

    async def send(self, commands: list[Message]) -> None:
        await self._polled.send(commands)


def _portable_message(message: Message) -> Message:
    name, arguments = message
    return name, tuple(portable(each) if isinstance(each, BaseException) else each for each in arguments)


def portable(error: BaseException) -> BaseException:
    """The error, or one with the same text if it cannot be sent to another process."""
    try:
        invoke(lambda: pickle.loads(pickle.dumps(error)))
    except Exception:  # noqa: BLE001 - pickle raises whatever the error's own hooks raise
        return MegasyncError(explain(error))
    return error
