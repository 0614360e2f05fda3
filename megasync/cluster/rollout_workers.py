"""Rollout workers: one in the driver, or processes of their own, which are restarted when they die or hang.

    starts ──▶ up: polled, given groups ──died, or no answer for `timeouts.rollout_worker`──▶ lost ──▶ killed, replaced

    task          does                                                  ends when
    ------------  ----------------------------------------------------  ----------------------------------------------
    one per slot  exchanges commands and events with a worker, and       its restart budget is spent: the slot is
                  replaces it                                           retired; `watch` raises when none is left

Invariant: followers learn of a lost worker before its replacement starts, so its groups are started elsewhere
once. What a lost worker that still lives commits until it is killed does no harm (`rollout.group_worker`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

from megasync.base.importing import name_of
from megasync.cluster.actors import ANSWER_SECONDS, EXIT_SECONDS, ActorGroup, kill_process
from megasync.cluster.pools import Pools
from megasync.concurrency.foreign import explain, invoke, shown
from megasync.concurrency.orphans import kill_orphans
from megasync.concurrency.tasks import cancel_and_wait, gather_or_cancel, to_its_end
from megasync.config import Config
from megasync.errors import ConfigError, MegasyncError, ProcessLost, ServerError
from megasync.observe.clock import clock_offset
from megasync.observe.context import RunContext
from megasync.observe.hang import RunProcess
from megasync.observe.state_file import ProcessState
from megasync.rollout.placement import Placement
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.worker_link import (
    MARK,
    Message,
    PolledEnd,
    Questions,
    RemoteProcess,
    Report,
    RolloutWorker,
    WorkerLink,
    WorkerProcess,
)
from megasync.serving.restart_budget import RestartBudget
from megasync.trajectory import Prompt

A = TypeVar("A")
T = TypeVar("T")

log = logging.getLogger(__name__)

# Seconds for workers to learn of a new version before servers may hold it. A worker that is busy longer discards
# answers of that version, and requests them again.
ANNOUNCE_SECONDS = 1.0


class RolloutWorkers:
    """The rollout workers: `rollout.workers` processes, or one in the driver.

    `make_process(number)` makes a worker's process, which is started later.
    """

    def __init__(
        self,
        config: Config,
        make_process: Callable[[int], WorkerProcess],
        quarantine: Quarantine,
        on_invalid_answer: Callable[[], None],
        context: RunContext,
        poison_folder: Path | None = None,
        questions: Questions | None = None,
    ) -> None:
        """Reports of prompts that kill workers are written to `poison_folder`. `questions` answer those of workers."""
        self._config = config
        self._timeouts = config.timeouts
        self._make_process = make_process
        self._quarantine = quarantine
        self._on_invalid_answer = on_invalid_answer
        self._context = context
        self._questions = questions or {}
        quarantine.follow(partial(self.tell, "watch", ""))
        self._links: dict[int, WorkerLink] = {}
        self._processes: dict[int, WorkerProcess] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._followers: list[tuple[Callable[[WorkerLink], None], Callable[[WorkerLink], None]]] = []
        self._servers: dict[str, list[str]] = {}
        # Commands that a worker gets when it starts: the last of each name and subject.
        self._states: dict[tuple[str, str], Message] = {}
        self._budgets: dict[int, RestartBudget] = {}
        # What runs where. Followers give their own work a place with it.
        self.placement: Placement[Any] = Placement(
            poison_folder, lambda number: self._budgets[number].refund(), context.clock
        )
        self.placement.follow(self._wake)
        self._placeable = asyncio.Event()
        self._asked = 0
        self._last_retired = ""
        # Of each worker: its state, why, and since when.
        self._states_of: dict[int, tuple[str, str, float]] = {}

    async def start(self) -> None:
        """Starts all workers concurrently. Raises MegasyncError when one does not start."""
        numbers, health = range(max(1, self._config.rollout.workers)), self._config.rollout.health
        processes = [self._make_process(number) for number in numbers]
        try:
            await gather_or_cancel(*(process.start(self._timeouts.server_start) for process in processes))
        except BaseException:
            await asyncio.gather(*(process.kill() for process in processes))
            raise
        for number, process in zip(numbers, processes, strict=True):
            supervising = self._supervise(number, process)
            self._tasks[number] = asyncio.create_task(supervising, name=f"rollout worker {number}")
            self._budgets[number] = RestartBudget(health.restarts, health.restart_window, self._context.clock)
        # Every worker is up once its task has run.
        await asyncio.sleep(0)

    def follow(self, on_up: Callable[[WorkerLink], None], on_lost: Callable[[WorkerLink], None]) -> None:
        """Calls `on_up` for every worker that is or comes up, and `on_lost` for each that is lost."""
        self._followers.append((on_up, on_lost))
        for link in self._links.values():
            on_up(link)

    def tell(self, name: str, subject: str, *arguments: Any) -> None:
        """Tells every worker, also one that starts later: only the last command with this name and subject counts."""
        self._states[name, subject] = (name, arguments)
        for link in self._links.values():
            link.tell(name, *arguments)

    def add_server(self, model: str, url: str) -> None:
        """Lets the workers use a server: of the rollout pool under "", of a frozen model under its key."""
        self._servers.setdefault(model, []).append(url)
        self.tell("set_servers", model, model, list(self._servers[model]))

    def remove_server(self, model: str, url: str) -> None:
        self._servers[model].remove(url)
        self.tell("set_servers", model, model, list(self._servers[model]))

    async def announce(self, published: int, newest: int) -> None:
        """Tells every worker the published version, and the newest that any server may hold from now on."""
        self._states["set_versions", ""] = ("set_versions", (published, newest))
        told = {asyncio.ensure_future(link.ask("versions", published, newest)): link for link in self._links.values()}
        if told:
            _, late = await asyncio.wait(told, timeout=ANNOUNCE_SECONDS)
            await cancel_and_wait(*told)
            for asked in late:
                # A withdrawn question may have been withdrawn before the worker began to answer it.
                told[asked].tell("set_versions", published, newest)

    async def ask(self, about: str, prompt: Prompt, name: str, *arguments: Any) -> Any:
        """The answer of a worker to a question about this prompt, or of another one if it is lost. Waits for a place.

        Raises what the worker raised, and PoisonPrompt for a prompt that kills workers. `about` names the prompt.
        """
        self._asked += 1
        key = f"{about}#{self._asked}"
        try:
            while True:
                placeable = self._placeable
                link = self.placement.place(key, prompt)
                if link is None:
                    await placeable.wait()
                    continue
                try:
                    return await link.ask(name, *arguments)
                except ProcessLost as loss:
                    log.debug("Asking another worker: %s", loss)
        finally:
            self.placement.ended(key)

    async def watch(self) -> None:
        """Raises ServerError when no worker is left and none can be started."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if self._tasks and all(task.done() for task in self._tasks.values()):
            raise ServerError(
                f"no rollout worker is left: each was restarted {self._config.rollout.health.restarts} times within "
                f"{self._config.rollout.health.restart_window:g} s (rollout.health.restarts). {self._last_retired}"
            )

    async def stop(self) -> None:
        """Closes what the workers' user code keeps open, within `timeouts.shutdown`, and ends them."""
        closing = [asyncio.ensure_future(link.ask("close")) for link in self._links.values()]
        if closing:
            await asyncio.wait(closing, timeout=self._timeouts.shutdown)
            await cancel_and_wait(*closing)
        await cancel_and_wait(*self._tasks.values())
        self._tasks.clear()

    def processes(self) -> list[RunProcess]:
        """The processes of the workers."""
        return [
            RunProcess(worker_name(number), node, pid)
            for number, process in self._processes.items()
            for node, pid in process.processes()
        ]

    def states(self) -> list[ProcessState]:
        """Every worker that is a process, for `state.json`."""
        return [
            ProcessState(
                name=worker_name(number),
                state=state,
                reason=reason,
                since=since,
                running=link.status.inflight_requests if (link := self._links.get(number)) else None,
            )
            for number, (state, reason, since) in sorted(self._states_of.items())
            if self._config.rollout.workers
        ]

    def _note(self, number: int, state: str, reason: str = "") -> None:
        self._states_of[number] = state, reason, time.time()

    def _wake(self) -> None:
        self._placeable.set()
        self._placeable = asyncio.Event()

    async def _supervise(self, number: int, process: WorkerProcess) -> None:
        health = self._config.rollout.health
        budget = self._budgets[number]
        reason = await self._follow_process(number, process)
        while (wait := budget.take()) is not None:
            log.warning("Rollout worker %d: %s; replacing it", number, reason)
            self._note(number, "starting", reason)
            await asyncio.sleep(wait)
            process = self._make_process(number)
            try:
                await process.start(self._timeouts.server_start)
            except MegasyncError as error:
                await to_its_end(process.kill())
                reason = f"it does not start: {error}"
            except BaseException:
                await to_its_end(process.kill())
                raise
            else:
                self._context.events.recovery(worker_name(number), "replaced")
                reason = await self._follow_process(number, process)
        self._note(number, "retired", reason)
        self._last_retired = f"The last one lost was {number}: {reason}"
        log.error("Rollout worker %d is not replaced (rollout.health.restarts=%d): %s", number, health.restarts, reason)

    async def _follow_process(self, number: int, process: WorkerProcess) -> str:
        """Uses a started process until it is lost, and ends it. Returns why it was lost."""
        client = object()
        link = WorkerLink(
            f"Rollout worker {number}",
            {"invalid_answer": self._on_invalid_answer, "end": partial(self._quarantine.end, client)},
            {"enter": partial(self._quarantine.enter, client), **self._questions},
            self._timeouts.shutdown,
        )
        connection = process.connect(link, self._timeouts.rollout_worker)
        for name, arguments in self._states.values():
            link.tell(name, *arguments)
        self._links[number], self._processes[number] = link, process
        self._note(number, "up")
        self.placement.add(link, number)
        for on_up, _ in self._followers:
            on_up(link)
        self._wake()
        loss, died = ProcessLost("it was stopped"), False
        try:
            await connection
        except ProcessLost as error:
            loss, died = error, True
            self._context.events.fault(worker_name(number), str(loss))
            if loss.silent:
                await self._context.reports.report(f"{worker_name(number)}: {loss}", {worker_name(number)})
        finally:
            del self._links[number], self._processes[number]
            self.placement.remove(link, str(loss), by_prompts=died)
            for _, on_lost in self._followers:
                on_lost(link)
            link.lose(loss)
            self._quarantine.lost(client)
            # A run that stops meanwhile must not leave what the worker has started.
            await to_its_end(process.kill())
        return str(loss)


class WorkerActor(RemoteProcess):
    """A worker in a Ray actor, without a device, on one of the nodes of the rollout pool."""

    def __init__(self, number: int, pools: Pools, build: Callable[[float], Awaitable[PolledEnd]]) -> None:
        self._number = number
        self._slot = pools.slot_on_node("rollout", number)
        self._options = pools.same_node_options("rollout", self._slot)
        self._build = build
        self._mark = uuid.uuid4().hex
        self._pid: int | None = None
        self._node = ""
        self._pools = pools
        self._group: ActorGroup | None = None

    def processes(self) -> list[tuple[str, int]]:
        return [] if self._pid is None else [(self._node, self._pid)]

    async def start(self, timeout: float) -> None:
        group = self._group = ActorGroup.create("rollout_worker", RolloutWorker, [()], [self._options])
        self._pid = await group.on_one(0, timeout, RolloutWorker.prepare, sys.path, self._mark)
        self._node = (await self._pools.nodes("rollout")).get(self._slot, "")
        offset = await clock_offset(lambda: group.on_one(0, timeout, RolloutWorker.clock))
        await group.on_one(0, timeout, RolloutWorker.open, self._build, offset)

    async def poll(self, seconds: float, timeout: float) -> Report:
        return await self._call(timeout, RolloutWorker.poll, seconds)

    async def send(self, commands: list[Message], timeout: float) -> None:
        await self._call(timeout, RolloutWorker.send, commands)

    async def kill(self) -> None:
        if self._group is not None:
            self._group.kill()
            self._group = None
        if self._pid is not None:
            # A stopped process does not notice that Ray ended it, and a killed one leaves behind what it has started.
            # The kill must come from its own node.
            kill = ray.remote(max_retries=0)(_kill_family).options(**self._options)
            ref: Any = kill.remote(self._pid, self._mark)
            killing = asyncio.ensure_future(asyncio.wrap_future(ref.future()))
            await asyncio.wait([killing], timeout=ANSWER_SECONDS)
            left = "unknown" if not killing.done() else killing.exception() or killing.result()
            if left:
                killing.cancel()
                log.warning("Processes of rollout worker %d may still be alive: %s", self._number, left)
            self._pid = None

    async def _call(
        self, timeout: float, method: Callable[[RolloutWorker, A], Coroutine[Any, Any, T]], argument: A
    ) -> T:
        if self._group is None:
            raise ProcessLost(f"rollout worker {self._number} does not run")
        try:
            return await self._group.on_one(0, timeout, method, argument)
        except ProcessLost as loss:
            if isinstance(loss.__cause__, RayActorError):
                # Ray describes the actor first, on many lines.
                detail = str(loss.__cause__).rpartition("Worker exit detail: ")[2]
                raise ProcessLost(f"its process {self._pid} died: {' '.join(detail.split())}") from loss
            silent = ProcessLost(
                f"it has not answered for {timeout:.0f} s (timeouts.rollout_worker): user code blocks its event loop, "
                f"or its process is stopped"
            )
            silent.silent = loss.silent
            raise silent from loss


def _kill_family(pid: int, mark: str) -> list[int]:
    """Kills a worker of this node and what it has started. Returns the ids of processes that remain."""
    kill_process(pid, RolloutWorker.__name__)
    return kill_orphans(pid, MARK, mark, EXIT_SECONDS)


def worker_name(number: int) -> str:
    """The name of a rollout worker in events."""
    return f"worker-{number}"


def check_travels(what: str, value: Any) -> None:
    """Raises ConfigError, naming `what`, for a value that cannot be sent to a worker."""
    try:
        # Ray does not declare what its module re-exports.
        invoke(lambda: cloudpickle.loads(cloudpickle.dumps(value)))  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:  # pickle raises whatever the object's own hooks raise
        what_it_is = name_of(value) if callable(value) else shown(value, 80)
        raise ConfigError(
            f"rollout.workers sends {what} to other processes, but {what_it_is} cannot be pickled "
            f"({explain(error)}). Define it at the top level of a module, without open files, locks or "
            f"clients in what it captures, or set rollout.workers=0"
        ) from error
