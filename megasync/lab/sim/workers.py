"""Rollout workers of a simulated run: the real worker, client and connection, over processes that die, hang and return.

A hung process does not answer its driver, but works on until it is killed: it commits, saves and sends requests while
its groups are started elsewhere. That is more than a real process does whose event loop is blocked.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from megasync.concurrency.tasks import cancel_and_wait
from megasync.config.schema import GroupConfig
from megasync.errors import ProcessLost
from megasync.evaluation.evaluate import Answerer
from megasync.evaluation.held_out import HeldOutSet
from megasync.lab.sim.distant import DistantBuffer
from megasync.lab.sim.language import CONTEXT, END, MOST_TOKENS, ROW_TOKEN, VOCABULARY, Tokenizer
from megasync.lab.sim.network import Network, SimSession
from megasync.lab.sim.servers import ROUTER_URL
from megasync.lab.sim.world import DEADLY_ROW, World
from megasync.rewards import RewardRunner
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.group_worker import FailurePolicy, GroupSpec, GroupWorker
from megasync.rollout.remote_quarantine import RemoteQuarantine
from megasync.rollout.remote_worker import Message, Outbox, Report, WorkerEnd
from megasync.rollout.selection import Selection
from megasync.rollout.workflow import Workflow

T = TypeVar("T")

START_SECONDS = 0.5
CALL_SECONDS = 0.002


def _sent(value: T) -> T:
    """The value as another process receives it. Fails as there for what cannot be sent."""
    return pickle.loads(pickle.dumps(value))


class SimWorkerProcess:
    """A `WorkerProcess` of the driver with number `driver`. `name` is unique among all processes."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        buffer: DistantBuffer,
        control: Callable[[str], Any],
        workflow: Workflow,
        held_out_workflow: Workflow,
        rewards: RewardRunner,
        held_out: HeldOutSet,
    ) -> None:
        self.name = name
        self._world = world
        self._chance, self._clock = world.chance, world.loop.time
        self._network = network
        self._buffer = buffer
        self._control = control
        self._workflow, self._held_out_workflow = workflow, held_out_workflow
        self._rewards, self._held_out = rewards, held_out
        self._deadly = "" if world.deadly is None else chr(ROW_TOKEN + world.deadly)
        self._died = asyncio.Event()
        self._hangs = False
        self._worker: GroupWorker | None = None
        self._client: RolloutClient
        self._end: WorkerEnd
        self._versions: tuple[int | None, int | None] = (None, None)

    @property
    def up(self) -> bool:
        return self._worker is not None and not self._died.is_set()

    # Faults

    def die(self) -> None:
        """Ends the worker as kill -9 would: nothing is saved or reported anymore."""
        self._died.set()
        if self._worker is not None:
            self._worker.halt().close()
            for task in self._end.answering():
                task.cancel()

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
        return _sent(await self._call(lambda: self._end.poll(seconds), timeout))

    async def send(self, commands: list[Message], timeout: float) -> None:
        await self._call(lambda: self._end.send(_sent(commands)), timeout)

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
        """As `app.rollout_worker.build_worker`."""
        config, seed = self._world.config, self._chance.seed
        outbox = Outbox(self._clock)
        quarantine: Any = RemoteQuarantine(partial(outbox.tell, "quarantine"), self._clock)
        self._client = client = RolloutClient(
            ROUTER_URL,
            [],
            ServedModel(VOCABULARY, CONTEXT, Tokenizer(), (END,)),
            RequestSettings.of(config),
            quarantine=quarantine,
            on_invalid_answer=partial(outbox.tell, "invalid_answer"),
        )
        session: Any = SimSession(self._network)
        client._session = session
        client._random = random.Random(f"client {seed} {self.name}")
        client.published_version = lambda: self._versions[0]
        client.newest_version = lambda: self._versions[1]
        self._worker = GroupWorker(
            client,
            self._buffer,
            GroupSpec(
                partial(self._run_workflow, self._workflow),
                self._rewards,
                Selection(GroupConfig(), config.schedule.samples_per_group, MOST_TOKENS),
                seed=seed,
            ),
            FailurePolicy(config.rollout.max_attempts, save_seconds=config.rollout.save_partials_seconds),
            quarantine=quarantine,
            clock=self._clock,
        )
        answerer = Answerer(client, partial(self._run_workflow, self._held_out_workflow), seed)

        async def answer(name: str, *rest: Any) -> Any:
            return await answerer(self._held_out, *rest)

        async def versions(published: int, newest: int) -> None:
            self._set_versions(published, newest)

        async def close() -> None: ...

        self._end = WorkerEnd(
            self._worker,
            outbox,
            quarantine,
            {"set_versions": self._set_versions, "set_servers": self._set_servers},
            {"answer": answer, "versions": versions, "close": close},
        )

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

    def _set_versions(self, published: int, newest: int) -> None:
        self._versions = published, newest

    def _set_servers(self, key: str, urls: list[str]) -> None:
        current = {server.url for server in self._client.servers}
        for url in sorted(current - set(urls)):
            self._client.remove_server(url)
        for url in urls:
            if url not in current:
                self._client.add_server(self._control(url))
