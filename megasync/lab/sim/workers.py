"""Rollout workers of a simulated run: the real worker, client and connection, over processes that die, hang and return.

A hung process does not answer its driver, but works on until it is killed: it commits, saves and sends requests while
its groups are started elsewhere. That is more than a real process does whose event loop is blocked.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from megasync.app.rollout_worker import serve_worker
from megasync.app.workload import Task
from megasync.buffer.segments import BodyWriter, GroupSink
from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import ProcessLost
from megasync.lab.sim.language import ROW_TOKEN
from megasync.lab.sim.network import Network, SimSession
from megasync.lab.sim.servers import ROUTER_URL
from megasync.lab.sim.world import DEADLY_ROW, World
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.group_worker import GroupWorker
from megasync.rollout.inflight import QuarantineClient
from megasync.rollout.worker_link import Message, PolledEnd, RemoteProcess, Report, WorkerEnd
from megasync.rollout.workflow import Workflow

T = TypeVar("T")

START_SECONDS = 0.5
CALL_SECONDS = 0.002


def _sent(value: T) -> T:
    """The value as another process receives it. Fails as there for what cannot be sent."""
    return pickle.loads(pickle.dumps(value))


def serve_sim_worker(
    world: World, network: Network, name: str, end: WorkerEnd, control: Callable[[str], Any], task: Task, buffer: Any
) -> tuple[RolloutClient, GroupWorker]:
    """Serves a worker as a real process does, over the simulated network. `name` is unique among all workers."""
    clock = world.loop.time
    quarantine = QuarantineClient(partial(end.ask, "enter"), partial(end.tell, "end"), clock)
    client = RolloutClient(
        ROUTER_URL,
        [],
        ServedModel(task.vocab_size, task.context_length, task.tokenizer, task.stop_ids),
        RequestSettings.of(world.config),
        quarantine=quarantine,
        on_invalid_answer=partial(end.tell, "invalid_answer"),
    )
    session: Any = SimSession(network)
    client._session = session
    # The client's random choices must reproduce with the seed.
    client._random = random.Random(f"client {world.chance.seed} {name}")

    async def close() -> None: ...

    options = quarantine, buffer, control, None, close, clock
    return client, serve_worker(end, world.config, task, client, *options)


class SimWorkerProcess(RemoteProcess):
    """A worker's process of the driver with number `driver`. `name` is unique among all processes."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        bodies: BodyWriter,
        control: Callable[[str], Any],
        task: Task,
    ) -> None:
        self.name = name
        self._world = world
        self._chance, self._clock = world.chance, world.loop.time
        self._network = network
        self._bodies = bodies
        self._control = control
        self._task = replace(task, workflow=partial(self._run_workflow, task.workflow))
        self._deadly = "" if world.deadly is None else chr(ROW_TOKEN + world.deadly)
        self._died = asyncio.Event()
        self._hangs = False
        self._worker: GroupWorker | None = None
        self._polled: PolledEnd
        self._client: RolloutClient

    @property
    def up(self) -> bool:
        return self._worker is not None and not self._died.is_set()

    # Faults

    def die(self) -> None:
        """Ends the worker as kill -9 would: nothing is saved or reported anymore."""
        self._died.set()
        if self._worker is not None:
            self._polled.end.abandon()

    def hang(self) -> None:
        self._hangs = True

    # `WorkerProcess`

    async def start(self, timeout: float) -> None:
        await asyncio.sleep(self._chance.seconds("call", START_SECONDS, f"start {self.name}"))
        if self._chance.happens("server dies while it starts", f"worker {self.name}"):
            raise ProcessLost(f"worker {self.name} died while it started")
        self._build()
        self._world.invariants.note(f"worker {self.name} is up")

    def processes(self) -> list[tuple[str, int]]:
        return []

    async def poll(self, seconds: float, timeout: float) -> Report:
        return _sent(await self._call(lambda: self._polled.poll(seconds), timeout))

    async def send(self, commands: list[Message], timeout: float) -> None:
        await self._call(lambda: self._polled.send(_sent(commands)), timeout)

    async def kill(self) -> None:
        if self.up:
            self._world.invariants.note(f"worker {self.name} is killed")
        self.die()
        if self._worker is not None:
            await self._client.close()

    async def _call(self, call: Callable[[], Awaitable[T]], timeout: float) -> T:
        await asyncio.sleep(self._chance.seconds("call", CALL_SECONDS, f"worker {self.name}"))
        died = asyncio.ensure_future(self._died.wait())
        answer = None if self._hangs else asyncio.ensure_future(call())
        try:
            waits = {died} if answer is None else {died, answer}
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answer is not None and answer.done() and not self._hangs and not self._died.is_set():
                return answer.result()
            if not self._died.is_set():
                await asyncio.wait({died}, timeout=timeout)
            reason = "died" if self._died.is_set() else f"has not answered for {timeout:g} s"
            raise ProcessLost(f"worker {self.name} {reason}")
        finally:
            await cancel_and_wait(*(task for task in (answer, died) if task is not None))

    def _build(self) -> None:
        """Opens a worker as `app.rollout_worker.start_worker` does."""
        end = WorkerEnd()
        self._polled = PolledEnd(end, self._clock)
        parts = end, self._control, self._task, GroupSink(partial(end.ask, "buffer"), self._bodies)
        self._client, self._worker = serve_sim_worker(self._world, self._network, self.name, *parts)

    async def _run_workflow(self, workflow: Workflow, client: Any, sample: dict[str, Any]) -> Any:
        """The driver's workflow, except for the row that kills or blocks its worker."""
        if self._deadly and sample["prompt"] == self._deadly:
            self._chance.met[DEADLY_ROW] += 1
            self._world.invariants.note(f"row {sample['prompt']!r} kills worker {self.name}")
            if self._chance.share("blocks") < 0.3:
                self.hang()
            else:
                self.die()
            await asyncio.Event().wait()
        return await workflow(client, sample)
