"""One schedule, from its seed to its end: builds the run, lets things go wrong, and asserts the laws.

Real: controller, recovery, watchdog, buffer, rollouter, rewards, prompt source. Fake: ranks, servers, fleet, transport,
client, and the way to the buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megasync.buffer import AsyncBuffer, BufferClosed, BufferStateError
from megasync.buffer.pacing import Pacing
from megasync.config import Config
from megasync.controller import Controller
from megasync.data import PromptSource
from megasync.errors import MegasyncError
from megasync.rollout.rewards import RewardRunner
from megasync.rollout.rollouter import Rollouter
from megasync.rollout.workflow import single_turn
from megasync.sim.chance import Chance
from megasync.sim.client import SimClient
from megasync.sim.clock import VirtualLoop
from megasync.sim.laws import Broken, Laws
from megasync.sim.ranks import SimRanks
from megasync.sim.rpc import DistantBuffer
from megasync.sim.servers import SimFleet
from megasync.sim.transport import SimPublisher

# These runs take a minute; one that takes an hour makes no progress, whatever it does.
LONGEST_RUN = 2_000.0
ROWS = 7
# Errors that are a clear end of a run that met more than it may: what `run` raised must be one of these.
REASONS = ("trainer.max_restarts", "no server has a restart left", "groups were dropped", "the link broke")


@dataclass(frozen=True)
class Outcome:
    """How a schedule ended: "finished", "stopped" (asked to), or the reason with which the run gave up."""

    seed: int
    ended: str
    steps: int
    versions: int
    # Virtual seconds.
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)


def simulate(seed: int, tamper: Callable[[World], None] | None = None) -> Outcome:
    """Runs one schedule. `tamper` may change the world before it starts: a test plants its bugs there.

    Raises Broken, Deadlock, Livelock or whatever else the run should not have raised; notes tell the seed and the end of
    the history.
    """
    loop = VirtualLoop()
    world = World(seed, loop)
    if tamper is not None:
        tamper(world)
    try:
        with _quiet(), asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(world.run())
    except BaseException as error:
        error.add_note(f"seed {seed}; the last events:\n" + "\n".join(world.laws.history[-40:]))
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """A schedule makes thousands of things fail, each of which would be logged."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class World:
    """The parts of one run, wired as `Run` wires the real ones."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.chance = Chance(seed)
        self.config = _config(self.chance.choice)
        self.loop = loop
        schedule = self.config.schedule
        self.laws = Laws(Pacing.of(schedule), loop.time)
        self.total_groups = schedule.total_steps * schedule.groups_per_step
        self.buffer = AsyncBuffer(schedule, self.total_groups, clock=loop.time)
        self.ranks = SimRanks(self.chance, self.laws, self.config.checkpoint.keep)
        self.fleet = SimFleet(self.config.rollout.servers, self.chance, self.laws)
        self.publisher = SimPublisher(self.ranks, self.chance, self.laws)
        self._broken: asyncio.Future[None] | None = None

    async def run(self) -> Outcome:
        self.laws.watch(self.buffer._state)
        distant = DistantBuffer(self.buffer, self.chance, self._orphan)
        controller = self._controller(distant)
        self.fleet.on_up, self.fleet.on_gone = self.publisher.add, self.publisher.remove
        self.fleet.start()
        self._broken = self.loop.create_future()
        helpers = [asyncio.create_task(self._kill(), name="kills")]
        if self.chance.choice.random() < 0.1:
            helpers.append(asyncio.create_task(self._ask_to_stop(controller), name="stop request"))
        running = asyncio.create_task(controller.run(), name="run")
        try:
            async with asyncio.timeout(LONGEST_RUN):
                await asyncio.wait({running, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            return await self._outcome(controller, running)
        except TimeoutError:
            raise Broken(f"the run is not over after {LONGEST_RUN:g} s: {await controller.dump()}") from None
        finally:
            for task in (running, self._broken, *helpers):
                task.cancel()
            await asyncio.gather(running, *helpers, return_exceptions=True)
            await self.fleet.stop()
            await distant.close_calls()

    def _controller(self, buffer: Any) -> Controller:
        config, clock = self.config, self.loop.time
        client = SimClient(self.fleet, self.chance, config.timeouts.request, clock)
        source = PromptSource([{"prompt": f"{row}"} for row in range(ROWS)], _Renderer(), True, self.chance.seed)
        rewards = RewardRunner(self._reward, 0)

        async def evaluate(step: int, version: int) -> dict[str, float]:
            await client.generate([1], routing_key=f"evaluation {step}")
            return {"eval/score": 0.0}

        rollouter = Rollouter(client, source, buffer, single_turn, rewards, config.schedule, clock=clock)
        return Controller(
            config,
            trainer=self.ranks,
            publisher=self.publisher,
            buffer=buffer,
            rollouter=rollouter,
            fleet=self.fleet,
            evaluate=evaluate,
            cursor=source.state,
            observer=_Observer(self.laws),
            clock=clock,
        )

    async def _reward(self, completions: list[str], prompt: str, **_: Any) -> list[float]:
        await asyncio.sleep(self.chance.seconds("call", 0.01, f"reward {prompt}"))
        if self.chance.happens("reward fails", prompt):
            raise ValueError("the answer cannot be parsed")
        return [float(index) for index in range(len(completions))]

    def _orphan(self, about: str, error: BaseException) -> None:
        """A call that nobody waits for failed: a lease that came too late, or the end of the run."""
        late = isinstance(error, BufferStateError) and about.startswith("lease")
        if not late and not isinstance(error, BufferClosed) and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _outcome(self, controller: Controller, running: asyncio.Task) -> Outcome:
        progress, error = controller.progress, running.exception()
        counts = self.buffer._state.counts()
        self.laws.balance(counts)
        if isinstance(error, MegasyncError) and any(reason in str(error) for reason in REASONS):
            ended = next(reason for reason in REASONS if reason in str(error))
        elif error is not None:
            raise error
        elif controller.stop_reason:
            ended = "stopped"
            saved = [checkpoint.step for checkpoint in self.ranks.checkpoints]
            self.laws.need(progress.step in (0, *saved[-1:]), f"stopped after step {progress.step}, saved {saved}")
        else:
            ended = "finished"
            self.laws.ends(self.config.schedule.total_steps, self.ranks.weights, counts)
        faults = {kind: met for kind, met in self.chance.met.items() if met}
        return Outcome(
            self.chance.seed, ended, progress.step, progress.version, self.loop.time(), faults, self.laws.history
        )

    # What goes wrong at any moment, besides what goes wrong in a step of a protocol

    async def _kill(self) -> None:
        choice = self.chance.choice
        blows = {"server dies": lambda s: s.gone.set(), "server wedges": lambda s: asyncio.create_task(self.fleet.wedge(s))}
        pause = choice.uniform(0.2, 5.0)
        for blow in range(choice.randrange(8)):
            await asyncio.sleep(self.chance.seconds("blow", pause))
            kind = choice.choice(["rank", *blows])
            self.laws.note(f"blow {blow}: {kind}")
            self.chance.met[f"blow: {kind}"] += 1
            if kind == "rank":
                self.ranks.kill()
            elif up := self.fleet.up():
                blows[kind](choice.choice(up))

    async def _ask_to_stop(self, controller: Controller) -> None:
        await asyncio.sleep(self.chance.choice.uniform(0.0, 12.0))
        controller.request_stop("asked")


def _config(choice: Any) -> Config:
    """Small runs of every shape: what is rare in a large one happens all the time in these."""
    config = Config()
    schedule = config.schedule
    schedule.total_steps = choice.randint(3, 8)
    schedule.groups_per_step = choice.randint(1, 3)
    schedule.samples_per_group = 2
    schedule.max_staleness = choice.randint(0, 2)
    schedule.weight_sync_steps = choice.choice([1, 1, 2, 3])
    schedule.window_fraction = choice.choice([None, 0.3, 1.0])
    schedule.over_age = choice.choice(["mask", "regenerate", "drop"])
    schedule.partial_rollout = choice.random() < 0.7
    schedule.max_inflight_groups = choice.choice([None, 2])
    config.rollout.servers = choice.randint(1, 3)
    config.checkpoint.every_steps = choice.randint(0, 3)
    config.checkpoint.keep = choice.randint(1, 2)
    config.eval.every_steps = choice.randint(0, 3)
    config.timeouts.request, config.timeouts.no_progress = 60.0, 300.0
    return config


class _Renderer:
    """Prompts of one token."""

    chat = False

    def prompts(self, rows: list[dict]) -> list[list[int]]:
        return [[1 + number] for number, _ in enumerate(rows)]


class _Observer:
    """Keeps what is said for the history, and drops what is measured."""

    def __init__(self, laws: Laws) -> None:
        self._laws = laws

    def message(self, text: str) -> None:
        self._laws.note(f"the run says: {text}")

    def step(self, step: int, version: int, metrics: dict) -> None: ...
    def evaluation(self, step: int, version: int, metrics: dict) -> None: ...
    def rewind(self, step: int) -> None: ...
    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: dict) -> None: ...
