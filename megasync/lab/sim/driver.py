"""One driver of a simulated run, from its start or resume until the run ends or the driver is killed.

Real: restore, controller, recovery, watchdog, buffer, ledger, fleet, rollouter, client with its chats, rewards, prompt
source. Fake: trainer ranks, server and router processes, HTTP, weight transport, and the RPCs to the buffer. They are
wired as `Run` wires the real parts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megasync.app.rollout_worker import AnswersOfWorkers, ServersOfWorkers
from megasync.buffer import AsyncBuffer, BufferClosed, BufferStateError
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.cluster.rollout_workers import RolloutWorkers
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config.schema import GroupConfig
from megasync.control.controller import Controller
from megasync.control.interfaces import ControlledParts, PinnedVersion
from megasync.control.restore import restore
from megasync.data import PromptSource, Renderer
from megasync.errors import (
    CheckpointError,
    EvaluationAbandoned,
    LedgerError,
    MegasyncError,
    ProcessLost,
    ServerError,
)
from megasync.evaluation.evaluate import AnswerAt, Answerer, HeldOutAnswer
from megasync.evaluation.held_out import HeldOutSet
from megasync.evaluation.periodic import PeriodicEvaluation
from megasync.lab.sim.distant import DistantBuffer
from megasync.lab.sim.fleet import SimFleet
from megasync.lab.sim.invariants import Broken, Invariants
from megasync.lab.sim.language import CONTEXT, END, MOST_TOKENS, ROW_TOKEN, VOCABULARY, Tokenizer, sampled_by
from megasync.lab.sim.network import Network, SimSession
from megasync.lab.sim.ranks import SimRanks
from megasync.lab.sim.servers import LIES, ROUTER_URL, SimServer
from megasync.lab.sim.transport import SimPublisher
from megasync.lab.sim.workers import SimWorkerProcess
from megasync.lab.sim.world import World
from megasync.rewards import RewardRunner
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.group_worker import FailurePolicy, GroupSpec, GroupWorker
from megasync.rollout.inflight import InflightCap
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.rollouter import Rollouter, ServerLimits
from megasync.rollout.selection import Selection
from megasync.rollout.suspects import CROWD_DEATHS
from megasync.sync.attempt import PublishError
from megasync.trainer import checkpoint
from megasync.trajectory import Prompt, Trajectory

# A simulated run takes about a minute, plus one deadline for each hang. A run that exceeds LONGEST_RUN seconds plus
# HANGS times the deadline of a training step makes no progress.
LONGEST_RUN, HANGS = 2_000.0, 20
# Drivers after which faults no longer strike at arbitrary moments. Up to two drivers are killed, a full disk ends some,
# and in rare schedules one start after another fails.
FAULTY_DRIVERS = 15
# Maximum seconds for closing the client.
CLOSE_SECONDS = 30.0
# Texts that identify the expected errors of a run that met more faults than it tolerates.
REASONS = (
    "trainer.max_restarts",
    "trainer.max_failed_steps",
    "rollout.min_servers",
    "groups were dropped",
    "the link broke",
    "no rollout worker is left",
)
# Responses of an evaluation that takes longer than a few steps.
EXACT_REPEATS = 12
# Ends of evaluations of an exact version: with a score although newer versions were published, and without one.
OUTLIVED, ABANDONED = "an evaluation outlives its version", "an evaluation is abandoned"
# The schema of a tool as the model receives it.
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Driver:
    """One driver and its parts. Raises LedgerError if it cannot write the run directory."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self._chance, self._invariants, self._loop = world.chance, world.invariants, world.loop
        self._config = config = world.config
        schedule, timeouts, health = config.schedule, config.timeouts, config.rollout.health
        rows = [{"prompt": chr(ROW_TOKEN + row)} for row in range(world.rows)]
        self._source = PromptSource(rows, _RowRenderer(), shuffle=True, seed=self._chance.seed)
        self._checkpoint = checkpoint.latest(world.run_dir)
        ledger = world.run_dir / LEDGER_FILE
        self.progress = restore(self._checkpoint, ledger, schedule, self._source, self._invariants.note)
        total = schedule.total_steps * schedule.groups_per_step
        self._orphan_error: asyncio.Future[None] = self._loop.create_future()
        self.buffer = DistantBuffer(
            lambda: AsyncBuffer(schedule, total, clock=self._loop.time, ledger=ledger),
            self._chance,
            self._invariants,
            self._orphan,
        )
        self._network = Network(self._chance, self._invariants)
        self._invariants.new_devices(config.cluster.colocate)
        self.ranks = SimRanks(
            self._chance, self._invariants, world.run_dir, config.checkpoint.keep, timeouts.train_step
        )
        poison = None if world.poison is None else ROW_TOKEN + world.poison
        self.fleet = SimFleet(world, number, self._network, poison)
        self._publisher = SimPublisher(self.ranks, self._network, timeouts.weight_sync)
        hang_seconds = health.request_failures * (health.request_seconds + health.request_timeout)
        self._quarantine = Quarantine(self.fleet, clock=self._loop.time, hang_seconds=hang_seconds)
        self.fleet.on_departure(self._quarantine.left)
        self._client = self._build_client()
        self._workers: RolloutWorkers | None = None
        self._worker_processes: list[SimWorkerProcess] = []
        self._controller = self._build_controller()
        self._started = False
        self._faults_before = self._fleet_faults()

    def _build_client(self) -> RolloutClient:
        """The real client over the simulated network."""
        client = RolloutClient(
            ROUTER_URL,
            [],
            ServedModel(VOCABULARY, CONTEXT, Tokenizer(), (END,)),
            RequestSettings.of(self._config),
            quarantine=self._quarantine,
            on_invalid_answer=self.fleet.check_all,
        )
        session: Any = SimSession(self._network)
        client._session = session
        # The client's random choices must reproduce with the seed.
        client._random = random.Random(f"client {self._chance.seed} {self._number}")
        client.newest_version = self.fleet.newest_version = lambda: self.progress.claimed
        client.published_version = lambda: self.progress.version
        return client

    def _build_controller(self) -> Controller:
        config, clock = self._config, self._loop.time
        rewards = RewardRunner(self._reward, 0)
        prompt = Prompt("held out", [ROW_TOKEN], {"prompt": chr(ROW_TOKEN)})
        repeats = EXACT_REPEATS if config.eval.exact else 2
        held_out = HeldOutSet("", [prompt], rewards, temperatures=[1.0], repeats=repeats)
        self.fleet.follow(self._publisher.add, self._publisher.remove)
        self.fleet.follow(self._client.add_server, self._client.remove_server)
        pressure = config.rollout.kv_pressure
        cap = None if pressure is None else InflightCap(config.rollout.servers, pressure)
        answer = Answerer(self._client, self._held_out_workflow, self._chance.seed)
        if config.rollout.workers:
            self._workers = RolloutWorkers(
                config,
                partial(self._worker_process, rewards, held_out),
                self._quarantine,
                self.fleet.check_all,
                clock=clock,
            )
        rollouter = Rollouter(
            self._source,
            self.buffer,
            config.schedule,
            servers=ServerLimits(self.fleet, cap, self._quarantine),
            placement=None if self._workers is None else self._workers.placement,
        )
        if self._workers is not None:
            servers = ServersOfWorkers(self._workers)
            self.fleet.follow(servers.add_server, servers.remove_server)
            self._workers.follow(rollouter.add, rollouter.remove)
            answer = AnswersOfWorkers(self._workers)
        else:
            selection = Selection(GroupConfig(), config.schedule.samples_per_group, MOST_TOKENS)
            worker = GroupWorker(
                self._client,
                self.buffer,
                GroupSpec(self._workflow, rewards, selection, seed=self._chance.seed),
                FailurePolicy(config.rollout.max_attempts, save_seconds=config.rollout.save_partials_seconds),
                quarantine=self._quarantine,
                clock=clock,
            )
            rollouter.add(worker)
        parts = ControlledParts(
            trainer=self.ranks,
            publisher=self._publisher,
            buffer=self.buffer,
            rollouter=rollouter,
            fleet=self.fleet,
            evaluate=partial(self._evaluate, answer, held_out),
            cursor=self._source.state,
            observer=_Observer(self._invariants),
            rollout_workers=self._workers,
        )
        return Controller(config, parts, self.progress, clock=clock)

    def _worker_process(self, rewards: RewardRunner, held_out: HeldOutSet, number: int) -> SimWorkerProcess:
        name = f"{self._number}-{number}-{len(self._worker_processes)}"
        process = SimWorkerProcess(
            *(self._world, self._network, name, self.buffer, self.fleet.control),
            *(self._workflow, self._held_out_workflow, rewards, held_out),
        )
        self._worker_processes.append(process)
        return process

    async def run(self, dies_after: float | None) -> str | None:
        """Run the driver and return how the run ended, or None if the run is to be resumed.

        The driver is killed after `dies_after` seconds unless the run ends earlier.
        """
        helpers = [asyncio.create_task(self._strike(), name="faults")]
        if self._chance.choice.random() < 0.1:
            helpers.append(asyncio.create_task(self._ask_to_stop(), name="stop request"))
        running = asyncio.create_task(self._start_and_run(), name="run")
        watched = {running, self._orphan_error}
        longest = LONGEST_RUN + HANGS * self._config.timeouts.train_step
        try:
            await asyncio.wait(watched, timeout=dies_after or longest, return_when=asyncio.FIRST_COMPLETED)
            if self._invariants.broken is not None:
                raise self._invariants.broken
            if self._orphan_error.done():
                self._orphan_error.result()
            if running.done():
                return self._judge(running.exception())
            if dies_after is None:
                raise Broken(f"the run is not over after {longest:g} s: {await self._controller.dump()}")
            self._invariants.note(f"driver {self._number} is killed")
            return None
        finally:
            self.buffer.cut()
            self._orphan_error.cancel()
            for process in self._worker_processes:
                process.die()
            await cancel_and_wait(running, *helpers)
            if self._workers is not None:
                await self._workers.stop()
            await self._quarantine.close()
            await self.fleet.stop()

    async def _start_and_run(self) -> None:
        """Start as `Run` does: publish the weights with their version to the servers before the first prompt."""
        if self._config.cluster.colocate:
            await self.ranks.offload()
        await self.fleet.start()
        version = self.progress.version
        if self._workers is not None:
            await self._workers.start()
            await self._workers.announce(version, self.progress.claimed)
        if self._checkpoint is not None or version:
            await self._publisher.publish(version)
        await self.buffer.publish(version)
        await self.fleet.joined([server.url for server in self.fleet.joiners()])
        self._started = True
        try:
            await self._controller.run()
        finally:
            began = self._loop.time()
            await self._client.close()
            took = self._loop.time() - began
            self._invariants.need(took < CLOSE_SECONDS, f"closing the client took {took:.0f} s")

    async def _workflow(self, client: Any, sample: dict[str, Any]) -> Trajectory:
        """Generate one response or, if the world uses chats, two with a tool result between them."""
        if self._world.chats:
            messages = [{"role": "user", "content": sample["prompt"]}]
            reply = await client.chat(messages, tools=[TOOL])
            await asyncio.sleep(self._chance.seconds("call", 0.05, f"tool {sample['prompt']}"))
            reply = await client.chat([*reply.messages, {"role": "tool", "content": "!"}], tools=[TOOL])
        else:
            reply = await client.generate(sample["prompt_ids"])
        return reply.trajectory()

    async def _held_out_workflow(self, client: Any, sample: dict[str, Any]) -> Trajectory:
        """The same, with the versions that really sampled the response as its text."""
        trajectory = await self._workflow(client, sample)
        sampled = zip(trajectory.logprobs, trajectory.loss_mask, strict=True)
        versions = sorted({sampled_by(float(logprob)) for logprob, trained in sampled if trained})
        return replace(trajectory, text=" ".join(map(str, versions)))

    async def _evaluate(
        self, answer: AnswerAt, held_out: HeldOutSet, step: int, version: int, pinned: PinnedVersion | None
    ) -> dict[str, float]:
        """The real evaluation. The last answer of each kind is the one that counts."""
        answers: dict[tuple[float, int, int], HeldOutAnswer] = {}

        async def answered(*job: Any) -> HeldOutAnswer:
            held_out_answer = await answer(*job)
            answers[held_out_answer.temperature, held_out_answer.number, held_out_answer.repeat] = held_out_answer
            return held_out_answer

        try:
            metrics = await PeriodicEvaluation(answered, [held_out], 2)(step, version, pinned)
        except EvaluationAbandoned:
            self._chance.met[ABANDONED] += 1
            raise
        if pinned is not None:
            self._invariants.scored(version, answers.values())
            self._invariants.note(
                f"step {step} is evaluated at version {version}; {self.progress.version} is published"
            )
            self._chance.met[OUTLIVED] += self.progress.version > version
        return metrics

    async def _reward(self, completions: list[str], prompt: str, **_: Any) -> list[float]:
        await asyncio.sleep(self._chance.seconds("call", 0.01, f"reward {prompt}"))
        if self._chance.happens("reward fails", prompt):
            raise ValueError("the answer cannot be parsed")
        return [float(index) for index in range(len(completions))]

    def _orphan(self, about: str, error: BaseException) -> None:
        """Handle the error of a call whose caller was cancelled.

        Expected causes are a late lease, the end of the run and a full disk. Any other error fails the schedule.
        """
        late = isinstance(error, BufferStateError) and about.startswith("lease")
        expected = late or isinstance(error, BufferClosed) or self._met_full_disk(error)
        if not expected and not self._orphan_error.done():
            self._orphan_error.set_exception(error)

    def _met_full_disk(self, error: BaseException | None) -> bool:
        """Return whether this is the expected error of a run whose disk was full."""
        named = isinstance(error, MegasyncError) and str(self._world.run_dir) in str(error)
        return named and self._world.disk.was_full and isinstance(error, (LedgerError, CheckpointError, BufferClosed))

    def _judge(self, error: BaseException | None) -> str | None:
        """Check the invariants of this ending and return its name, or None if the run is to be resumed."""
        if self._met_full_disk(error):
            self._invariants.note(f"driver {self._number} ends, its disk was full: {type(error).__name__}")
            return None
        counts = self.buffer.process._state.counts()
        self._invariants.balance(counts)
        if isinstance(error, (PublishError, ProcessLost, ServerError)) and not self._started:
            # The run can be resumed after a failed start.
            return None
        if isinstance(error, MegasyncError) and any(reason in str(error) for reason in REASONS):
            return self._explained(next(reason for reason in REASONS if reason in str(error)))
        if error is not None:
            raise error
        if self._controller.stop_reason:
            saved = checkpoint.latest(self._world.run_dir)
            step = 0 if saved is None else checkpoint.step_of(saved)
            self._invariants.need(self.progress.step == step, f"stopped after step {self.progress.step}, saved {step}")
            return "stopped"
        self._invariants.ends(self._config.schedule.total_steps, self.ranks.weights, counts)
        return "finished"

    def _explained(self, reason: str) -> str:
        """Check that enough faults occurred to justify giving up for this reason, and return the reason.

        A run may lose its fleet only to more deaths than a server has restarts. Deaths caused by one prompt count only
        when they look like the server's own fault: before the prompt is convicted, and in a sync.
        """
        if reason == "rollout.min_servers":
            faults, unproven = self._fleet_faults() - self._faults_before, self.fleet.unproven
            restarts = self._config.rollout.health.restarts
            self._invariants.need(
                faults + unproven > restarts,
                f"the servers are lost to {faults} faults and {unproven} deaths by a prompt, "
                f"each has {restarts} restarts",
            )
        if reason == "no rollout worker is left":
            met, restarts = self._worker_faults(), self._config.rollout.health.restarts
            # A row that kills its worker costs no more than its losses beside others, before it is convicted.
            met += CROWD_DEATHS if self._world.deadly is not None else 0
            self._invariants.need(met > restarts, f"all workers are lost to {met} faults, each has {restarts} restarts")
        return reason

    def _worker_faults(self) -> int:
        return sum(met for kind, met in self._chance.met.items() if "worker" in kind or "starts" in kind)

    def _fleet_faults(self) -> int:
        """Count the faults that may have cost a server a restart, over all drivers so far."""
        return sum(met for kind, met in self._chance.met.items() if "server" in kind or "rank" in kind)

    # Faults at an arbitrary moment, in addition to the faults at a step of a protocol

    async def _strike(self) -> None:
        if self._number > FAULTY_DRIVERS:
            return
        choice = self._chance.choice
        pause = choice.uniform(0.2, 5.0)
        faults = AT_ANY_MOMENT | (OF_WORKERS if self._workers is not None else {})
        for number in range(choice.randrange(8)):
            await asyncio.sleep(self._chance.seconds("fault", pause, f"{self._number}"))
            kind = choice.choice(list(faults))
            if self._world.likely in faults and choice.random() < 0.5:
                kind = self._world.likely
            self._invariants.note(f"fault {number}: {kind}")
            self._chance.met[f"at any moment: {kind}"] += 1
            faults[kind](self)

    def hit_a_server(self, hit: Callable[[SimServer], None]) -> None:
        if up := self.fleet.up():
            hit(self._chance.choice.choice(up))

    def slow_a_server(self) -> None:
        # A server without peers cannot be detected as slow. The run then proceeds at its pace, which must not trip the
        # check for progress.
        slowness = self._chance.choice.uniform(10.0, 100.0 if self._config.rollout.servers > 1 else 11.0)
        self.hit_a_server(lambda server: setattr(server, "slowness", slowness))

    def make_a_server_lie(self) -> None:
        def lie(server: SimServer) -> None:
            server.lie = self._chance.choice.choice(LIES)
            self._invariants.note(f"{server.url} lies: {server.lie}")

        self.hit_a_server(lie)

    def fill_the_disk(self) -> None:
        self._world.disk.fill(self._chance.choice.choice([0, 4096, 40_000]))

    def hit_a_worker(self, hit: Callable[[SimWorkerProcess], None]) -> None:
        if up := [process for process in self._worker_processes if process.up]:
            hit(self._chance.choice.choice(up))

    async def _ask_to_stop(self) -> None:
        await asyncio.sleep(self._chance.choice.uniform(0.0, 12.0))
        self._controller.request_stop("asked")


# Faults that strike at an arbitrary moment.
AT_ANY_MOMENT: dict[str, Callable[[Driver], None]] = {
    "rank dies": lambda driver: driver.ranks.kill(),
    "buffer dies": lambda driver: driver.buffer.crash(),
    "router dies": lambda driver: driver.fleet.router.kill(),
    "server dies": lambda driver: driver.hit_a_server(SimServer.kill),
    "server wedges": lambda driver: driver.hit_a_server(SimServer.wedge),
    "server slows down": Driver.slow_a_server,
    "server lies": Driver.make_a_server_lie,
    "disk is full": Driver.fill_the_disk,
}

# The same, in schedules with rollout workers.
OF_WORKERS: dict[str, Callable[[Driver], None]] = {
    "worker dies": lambda driver: driver.hit_a_worker(SimWorkerProcess.die),
    "worker hangs": lambda driver: driver.hit_a_worker(SimWorkerProcess.hang),
}


class _RowRenderer(Renderer):
    """Renders each row as a prompt of one token."""

    def __init__(self) -> None: ...

    @property
    def chat(self) -> bool:
        return False

    def prompts(self, rows: Sequence[Mapping[str, Any]], name: str = "") -> list[list[int]]:
        return [[ROW_TOKEN + number] for number, _ in enumerate(rows)]


class _Observer:
    """Records messages in the history and discards metrics."""

    def __init__(self, invariants: Invariants) -> None:
        self._invariants = invariants

    def message(self, text: str) -> None:
        self._invariants.note(f"the run says: {text}")

    def step(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, step: int, version: int, metrics: dict[str, float]) -> None: ...
    def rewind(self, step: int) -> None: ...
    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: Mapping[str, Any], waiting: Mapping[str, str]) -> None: ...
    def checkpoint(self, step: int, path: Path) -> None: ...
    def published(self, step: int, version: int, metrics: Mapping[str, float]) -> None: ...
    def fault(self, what: str, text: str, **fields: Any) -> None: ...
    def recovery(self, what: str, text: str, **fields: Any) -> None: ...
