"""One driver of a simulated run, from its start or resume until the run ends or the driver is killed.

Real: restore, controller, recovery, watchdog, buffer, ledger, fleet, rollouter, client with its chats, rewards, prompt
source. Fake: trainer ranks, server and router processes, HTTP, weight transport, and the threads of the buffer. All are
wired as `Run` wires the real parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megasync.app.rollout_worker import answers_of
from megasync.app.workload import Task
from megasync.buffer import BufferClosed
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.buffer.segments import BodyWriter, segments_of
from megasync.cluster.rollout_workers import RolloutWorkers, worker_name
from megasync.concurrency.tasks import cancel_and_wait
from megasync.control.controller import Controller
from megasync.control.interfaces import ControlledParts
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
from megasync.evaluation.evaluate import Answer, AnswerJob, HeldOutAnswer
from megasync.evaluation.held_out import HeldOutSet
from megasync.evaluation.periodic import PeriodicEvaluation
from megasync.lab.sim.buffer import SimBuffer, SimThreads
from megasync.lab.sim.fleet import SimFleet
from megasync.lab.sim.invariants import Broken, Invariants
from megasync.lab.sim.language import CONTEXT, END, ROW_TOKEN, VOCABULARY, Tokenizer, sampled_by
from megasync.lab.sim.network import Network
from megasync.lab.sim.ranks import SimRanks
from megasync.lab.sim.servers import LIES, SimServer
from megasync.lab.sim.transport import SimPublisher
from megasync.lab.sim.workers import SimWorkerProcess, serve_sim_worker
from megasync.lab.sim.world import World
from megasync.observe.context import RunContext
from megasync.rewards import RewardRunner
from megasync.rewards.scoring import Scoring
from megasync.rollout.client import ANYWHERE, Destination, PinnedVersion, RolloutClient
from megasync.rollout.inflight import InflightCap
from megasync.rollout.placement import CROWD_DEATHS
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.rollouter import Rollouter, ServerLimits
from megasync.rollout.worker_link import LocalProcess, WorkerEnd, WorkerProcess
from megasync.sync.attempt import PublishError
from megasync.trainer import checkpoint
from megasync.trajectory import Prompt, Trajectory

# A simulated run takes about a minute, plus one deadline for each hang. A run that exceeds LONGEST_RUN seconds plus
# HANGS times the deadline of a training step makes no progress.
LONGEST_RUN, HANGS = 2_000.0, 20
# Drivers after which faults no longer strike at arbitrary moments. Up to two drivers are killed, a full disk ends some,
# and in rare schedules one start after another fails.
FAULTY_DRIVERS = 15
# Drivers that die while the buffer writes.
DYING_DRIVERS = 5
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
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._threads = SimThreads(self._chance, self._die if number <= DYING_DRIVERS else None)
        self.buffer = SimBuffer(self._invariants, self._threads, schedule, total, clock=self._loop.time, ledger=ledger)
        self._network = Network(self._chance, self._invariants)
        self._invariants.new_devices(config.cluster.colocate)
        self.ranks = SimRanks(
            self._chance, self._invariants, world.run_dir, config.checkpoint.keep, timeouts.train_step
        )
        poison = None if world.poison is None else ROW_TOKEN + world.poison
        self._observer = _Observer(self._invariants)
        self._context = RunContext(
            events=self._observer, newest_version=lambda: self.progress.claimed, clock=self._loop.time
        )
        self.fleet = SimFleet(world, number, self._network, poison, self._context)
        self._publisher = SimPublisher(self.ranks, self._network, timeouts.weight_sync)
        hang_seconds = health.request_failures * (health.request_seconds + health.request_timeout)
        self._quarantine = Quarantine(self.fleet.reservations, clock=self._loop.time, hang_seconds=hang_seconds)
        self.fleet.on_departure(self._quarantine.left)
        self._worker_processes: list[SimWorkerProcess] = []
        # Of workers in the driver.
        self._clients: list[RolloutClient] = []
        self._controller = self._build_controller()
        self._started = False
        self._faults_before = self._fleet_faults()

    def _build_controller(self) -> Controller:
        config = self._config
        prompt = Prompt("held out", [ROW_TOKEN], {"prompt": chr(ROW_TOKEN)})
        repeats = EXACT_REPEATS if config.eval.exact else 2
        rewards = RewardRunner(self._reward, 0)
        held_out = HeldOutSet("", [prompt], rewards, temperatures=[1.0], repeats=repeats)
        task = Task(
            tokenizer=Tokenizer(),
            vocab_size=VOCABULARY,
            context_length=CONTEXT,
            eval_sets=[held_out],
            workflow=self._workflow,
            scoring=Scoring(config, self._reward),
            rewards=rewards,
            auxiliary={},
            stop_ids=frozenset({END}),
        )
        self._workers = RolloutWorkers(
            config,
            partial(self._worker_process, task),
            self._quarantine,
            self.fleet.check_all,
            self._context,
            questions={"buffer": self.buffer.of_worker},
        )
        self.fleet.follow(self._publisher.add, self._publisher.remove)
        self.fleet.follow(
            lambda server: self._workers.add_server("", server.url), partial(self._workers.remove_server, "")
        )
        pressure = config.rollout.kv_pressure
        cap = None if pressure is None else InflightCap(config.rollout.servers, pressure)
        rollouter = Rollouter(
            self._source,
            self.buffer,
            config.schedule,
            servers=ServerLimits(self.fleet, cap, self._quarantine),
            placement=self._workers.placement,
        )
        self._workers.follow(rollouter.add, rollouter.remove)
        parts = ControlledParts(
            trainer=self.ranks,
            publisher=self._publisher,
            buffer=self.buffer,
            rollouter=rollouter,
            fleet=self.fleet,
            reservations=self.fleet.reservations,
            evaluate=partial(self._evaluate, answers_of(self._workers), held_out),
            cursor=self._source.state,
            observer=self._observer,
            rollout_workers=self._workers,
        )
        return Controller(config, self._context, parts, self.progress)

    def _worker_process(self, task: Task, number: int) -> WorkerProcess:
        name = f"{self._number}-{number}-{len(self._worker_processes)}"
        if not self._config.rollout.workers:
            return LocalProcess(partial(self._local_worker, name, task))
        bodies = BodyWriter(segments_of(self._world.run_dir / LEDGER_FILE), worker_name(number), run=self._threads)
        process = SimWorkerProcess(self._world, self._network, name, bodies, self.fleet.control, task)
        self._worker_processes.append(process)
        return process

    def _local_worker(self, name: str, task: Task) -> WorkerEnd:
        end = WorkerEnd()
        parts = end, self.fleet.control, task, self.buffer
        client, _ = serve_sim_worker(self._world, self._network, name, *parts)
        self._clients.append(client)
        return end

    async def run(self, dies_after: float | None) -> str | None:
        """Run the driver and return how the run ended, or None if the run is to be resumed.

        The driver is killed after `dies_after` seconds unless the run ends earlier.
        """
        helpers = [asyncio.create_task(self._strike(), name="faults")]
        if self._chance.choice.random() < 0.1:
            helpers.append(asyncio.create_task(self._ask_to_stop(), name="stop request"))
        running = asyncio.create_task(self._start_and_run(), name="run")
        longest = LONGEST_RUN + HANGS * self._config.timeouts.train_step
        try:
            ends = {running, self._died}
            await asyncio.wait(ends, timeout=dies_after or longest, return_when=asyncio.FIRST_COMPLETED)
            if self._invariants.broken is not None:
                raise self._invariants.broken
            if running.done():
                return self._judge(running.exception())
            if dies_after is None and not self._died.done():
                raise Broken(f"the run is not over after {longest:g} s: {await self._controller.dump()}")
            self._invariants.note(f"driver {self._number} is killed")
            return None
        finally:
            self.buffer.cut()
            self._died.cancel()
            for process in self._worker_processes:
                process.die()
            await cancel_and_wait(running, *helpers)
            await self._workers.stop()
            await self._quarantine.close()
            await self.fleet.stop()

    async def _start_and_run(self) -> None:
        """Start as `Run` does: publish the weights with their version to the servers before the first prompt."""
        if self._config.cluster.colocate:
            await self.ranks.offload()
        await self.fleet.start()
        version = self.progress.version
        await self._workers.start()
        await self._workers.announce(version, self.progress.claimed)
        started = self.fleet.joiners()
        if self._checkpoint is not None or version:
            await self._publisher.publish(version)
        await self.buffer.publish(version)
        await self.fleet.joined([server.url for server in self.fleet.joiners() if server in started])
        self._started = True
        try:
            await self._controller.run()
        finally:
            for client in self._clients:
                began = self._loop.time()
                await client.close()
                took = self._loop.time() - began
                self._invariants.need(took < CLOSE_SECONDS, f"closing the client took {took:.0f} s")

    async def _workflow(self, client: Any, sample: dict[str, Any]) -> Trajectory:
        """Generate one response or, if the world uses chats, two with a tool result between them.

        The text are the versions that really sampled it, which the invariants of evaluations compare.
        """
        if self._world.chats:
            messages = [{"role": "user", "content": sample["prompt"]}]
            reply = await client.chat(messages, tools=[TOOL])
            await asyncio.sleep(self._chance.seconds("call", 0.05, f"tool {sample['prompt']}"))
            reply = await client.chat([*reply.messages, {"role": "tool", "content": "!"}], tools=[TOOL])
        else:
            reply = await client.generate(sample["prompt_ids"])
        trajectory = reply.trajectory()
        sampled = zip(trajectory.logprobs, trajectory.loss_mask, strict=True)
        versions = sorted({sampled_by(float(logprob)) for logprob, trained in sampled if trained})
        return replace(trajectory, text=" ".join(map(str, versions)))

    async def _evaluate(
        self, answer: Answer, held_out: HeldOutSet, step: int, version: int, pinned: PinnedVersion | None
    ) -> dict[str, float]:
        """The real evaluation. The last answer of each kind is the one that counts."""
        answers: dict[tuple[float, int, int], HeldOutAnswer] = {}

        async def answered(job: AnswerJob, destination: Destination = ANYWHERE, /) -> HeldOutAnswer:
            result = await answer(job, destination)
            answers[result.temperature, result.number, result.repeat] = result
            return result

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

    def _die(self) -> None:
        if not self._died.done():
            self._died.set_result(None)

    def _met_full_disk(self, error: BaseException | None) -> bool:
        """Return whether this is the expected error of a run whose disk was full."""
        named = isinstance(error, MegasyncError) and str(self._world.run_dir) in str(error)
        return named and self._world.disk.was_full and isinstance(error, (LedgerError, CheckpointError, BufferClosed))

    def _judge(self, error: BaseException | None) -> str | None:
        """Check the invariants of this ending and return its name, or None if the run is to be resumed."""
        if self._met_full_disk(error):
            self._invariants.note(f"driver {self._number} ends, its disk was full: {type(error).__name__}")
            return None
        counts = self.buffer._state.counts()
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
        faults = AT_ANY_MOMENT | (OF_WORKERS if self._config.rollout.workers else {})
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
    "router dies": lambda driver: driver.fleet.simulated_router.kill(),
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
