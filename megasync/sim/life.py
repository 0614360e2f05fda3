"""One driver of a simulated run: from its start, or resume, to its end, or to its death.

Real: restoring, controller, recovery, watchdog, buffer, ledger, fleet, rollouter, rewards, prompt source. Fake: ranks, the
processes of servers and router, transport, client, and the way to the buffer. They are wired as `Run` wires the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.buffer import AsyncBuffer, BufferClosed, BufferStateError
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.controller import Controller
from megasync.data import PromptSource
from megasync.errors import MegasyncError, RankLost, ServerError
from megasync.restore import restore
from megasync.rewards import RewardRunner
from megasync.rollout.rollouter import Rollouter
from megasync.rollout.workflow import single_turn
from megasync.sim.client import SimClient
from megasync.sim.distant import DistantBuffer
from megasync.sim.fleet import SimFleet
from megasync.sim.laws import Broken
from megasync.sim.ranks import SimRanks
from megasync.sim.servers import SimServer
from megasync.sim.transport import SimPublisher
from megasync.sync.attempt import PublishError
from megasync.trainer import checkpoint

if TYPE_CHECKING:
    from megasync.sim.world import World

# These runs take a minute, and a deadline for whatever hangs; one that takes much longer makes no progress.
LONGEST_LIFE, HANGS = 2_000.0, 20
ROWS = 7
# Errors that are a clear end of a run that met more than it may: what `run` raised must be one of these.
REASONS = (
    "trainer.max_restarts",
    "trainer.max_failed_steps",
    "rollout.min_servers",
    "groups were dropped",
    "the link broke",
)


class Life:
    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self._chance, self._laws, self._loop = world.chance, world.laws, world.loop
        self._config = config = world.config
        schedule = config.schedule
        rows = [{"prompt": f"{row}"} for row in range(ROWS)]
        self._source = PromptSource(rows, _Renderer(), shuffle=True, seed=self._chance.seed)
        self._checkpoint = checkpoint.latest(world.run_dir)
        ledger = world.run_dir / LEDGER_FILE
        self.progress = restore(self._checkpoint, ledger, schedule, self._source, self._laws.note)
        total = schedule.total_steps * schedule.groups_per_step
        self._orphan_error: asyncio.Future[None] = self._loop.create_future()
        self._buffer = DistantBuffer(
            lambda: AsyncBuffer(schedule, total, clock=self._loop.time, ledger=ledger),
            self._chance,
            self._laws,
            self._orphan,
        )
        self._ranks = SimRanks(
            self._chance, self._laws, world.run_dir, config.checkpoint.keep, config.timeouts.train_step
        )
        self._fleet = SimFleet(config, world.run_dir, number, self._chance, self._laws, self._loop.time)
        self._publisher = SimPublisher(self._ranks, self._chance, self._laws, config.timeouts.weight_sync)
        self._controller = self._wire()
        self._started = False

    def _wire(self) -> Controller:
        config, clock = self._config, self._loop.time
        client = SimClient(self._fleet, self._chance, config.timeouts.request, clock)
        rewards = RewardRunner(self._reward, 0)

        async def evaluate(step: int, version: int) -> dict[str, float]:
            # As in the real one, an answer that fails counts as wrong.
            with contextlib.suppress(ServerError):
                await client.generate([1], routing_key=f"evaluation {step}")
            return {"eval/score": 0.0}

        self._fleet.follow(self._publisher.add, self._publisher.remove)
        rollouter = Rollouter(
            client, self._source, self._buffer, single_turn, rewards, config.schedule, fleet=self._fleet, clock=clock
        )
        return Controller(
            config,
            trainer=self._ranks,
            publisher=self._publisher,
            buffer=self._buffer,
            rollouter=rollouter,
            fleet=self._fleet,
            evaluate=evaluate,
            cursor=self._source.state,
            observer=_Observer(self._laws, self._world.run_dir),
            progress=self.progress,
            clock=clock,
        )

    async def run(self, dies_after: float | None) -> str | None:
        """How the run ended; None when this driver was killed before."""
        helpers = [asyncio.create_task(self._strike(), name="blows")]
        if self._chance.choice.random() < 0.1:
            helpers.append(asyncio.create_task(self._ask_to_stop(), name="stop request"))
        running = asyncio.create_task(self._start_and_run(), name="run")
        watched = {running, self._orphan_error}
        try:
            longest = LONGEST_LIFE + HANGS * self._config.timeouts.train_step
            await asyncio.wait(watched, timeout=dies_after or longest, return_when=asyncio.FIRST_COMPLETED)
            if self._orphan_error.done():
                self._orphan_error.result()
            if running.done():
                return self._judge(running.exception())
            if dies_after is None:
                raise Broken(f"the run is not over after {longest:g} s: {await self._controller.dump()}")
            self._laws.note(f"driver {self._number} is killed")
            return None
        finally:
            self._buffer.cut()
            self._orphan_error.cancel()
            for task in (running, *helpers):
                task.cancel()
            await asyncio.gather(running, *helpers, return_exceptions=True)
            await self._fleet.stop()

    async def _start_and_run(self) -> None:
        """As `Run` does: the servers get the weights under their number before the first prompt."""
        await self._fleet.start()
        version = self.progress.version
        if self._checkpoint is not None or version:
            await self._publisher.publish(version)
        await self._buffer.publish(version)
        await self._fleet.joined([server.url for server in self._fleet.joiners()])
        self._started = True
        await self._controller.run()

    async def _reward(self, completions: list[str], prompt: str, **_: Any) -> list[float]:
        await asyncio.sleep(self._chance.seconds("call", 0.01, f"reward {prompt}"))
        if self._chance.happens("reward fails", prompt):
            raise ValueError("the answer cannot be parsed")
        return [float(index) for index in range(len(completions))]

    def _orphan(self, about: str, error: BaseException) -> None:
        """A call that nobody waits for failed: a lease that came too late, or the end of the run."""
        late = isinstance(error, BufferStateError) and about.startswith("lease")
        if not late and not isinstance(error, BufferClosed) and not self._orphan_error.done():
            self._orphan_error.set_exception(error)

    def _judge(self, error: BaseException | None) -> str | None:
        """Asserts what must hold at such an end, and names it. None for a start that failed: it can be made again."""
        counts = self._buffer.process._state.counts()
        self._laws.balance(counts)
        if isinstance(error, (PublishError, RankLost, ServerError)) and not self._started:
            return None
        if isinstance(error, MegasyncError) and any(reason in str(error) for reason in REASONS):
            return next(reason for reason in REASONS if reason in str(error))
        if error is not None:
            raise error
        if self._controller.stop_reason:
            saved = checkpoint.latest(self._world.run_dir)
            step = 0 if saved is None else checkpoint.step_of(saved)
            self._laws.need(self.progress.step == step, f"stopped after step {self.progress.step}, saved {step}")
            return "stopped"
        self._laws.ends(self._config.schedule.total_steps, self._ranks.weights, counts)
        return "finished"

    # What goes wrong at any moment, besides what goes wrong in a step of a protocol

    async def _strike(self) -> None:
        choice = self._chance.choice
        blows = {
            "rank": self._ranks.kill,
            "buffer": self._buffer.crash,
            "server": lambda: self._one_server(SimServer.kill),
            "wedge": lambda: self._one_server(SimServer.wedge),
            "router": self._fleet.router.kill,
        }
        pause = choice.uniform(0.2, 5.0)
        for blow in range(choice.randrange(8)):
            await asyncio.sleep(self._chance.seconds("blow", pause, f"{self._number}"))
            kind = choice.choice(list(blows))
            self._laws.note(f"blow {blow}: {kind}")
            self._chance.met[f"blow: {kind}"] += 1
            blows[kind]()

    def _one_server(self, hit: Any) -> None:
        if up := self._fleet.up():
            hit(self._chance.choice.choice(up))

    async def _ask_to_stop(self) -> None:
        await asyncio.sleep(self._chance.choice.uniform(0.0, 12.0))
        self._controller.request_stop("asked")


class _Renderer:
    """Prompts of one token."""

    chat = False

    def prompts(self, rows: list[dict]) -> list[list[int]]:
        return [[1 + number] for number, _ in enumerate(rows)]


class _Observer:
    """Keeps what is said for the history, and drops what is measured."""

    def __init__(self, laws: Any, run_dir: Path) -> None:
        self._laws = laws
        self._run_dir = run_dir

    def message(self, text: str) -> None:
        # The folder has a new name each time.
        self._laws.note(f"the run says: {text.replace(str(self._run_dir), 'RUN')}")

    def step(self, step: int, version: int, metrics: dict) -> None: ...
    def evaluation(self, step: int, version: int, metrics: dict) -> None: ...
    def rewind(self, step: int) -> None: ...
    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: dict) -> None: ...
