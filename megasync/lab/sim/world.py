"""One schedule of a seed: a sequence of drivers over one run directory, each killed or ended and then resumed."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megasync.config import Config
from megasync.config.pacing import Pacing
from megasync.errors import CheckpointError, LedgerError
from megasync.lab.sim.chance import Chance
from megasync.lab.sim.clock import VirtualLoop
from megasync.lab.sim.driver import FAULTY_DRIVERS, Driver
from megasync.lab.sim.language import MOST_TOKENS
from megasync.lab.sim.laws import Laws
from megasync.lab.sim.workers import DEADLY_ROW

# The run directory is in memory if possible: writing ledger and checkpoints is a thousand times faster there.
SHARED_MEMORY = Path("/dev/shm")
ROWS = 7
# Maximum drivers of a run. Once the faults have ceased, the remaining drivers must finish it.
MAX_DRIVERS = 20
DEFAULT_TIMEOUTS = "default timeouts"
# Seeds from this one on have rollout workers in processes of their own, from the second on ranks and servers that share
# their devices, and from the third on evaluations of an exact version.
FIRST_WITH_WORKERS = 1_000_000
FIRST_COLOCATED = 2_000_000
FIRST_EXACT = 3_000_000
# Settings that may change when a run is resumed.
RESUMABLE = (
    "schedule.total_steps",
    "schedule.groups_per_step",
    "schedule.samples_per_group",
    "schedule.max_staleness",
    "schedule.weight_sync_steps",
    "schedule.window_fraction",
    "schedule.stale",
    "schedule.partial_rollout",
    "schedule.max_inflight_groups",
    "rollout.servers",
    "rollout.stream_interval",
    "checkpoint.every_steps",
    "checkpoint.keep",
)


@dataclass(frozen=True)
class Outcome:
    """The result of a schedule.

    `ended` is "finished", "stopped" (a stop was requested) or the reason why the run failed.
    """

    seed: int
    ended: str
    steps: int
    versions: int
    # Number of drivers, and virtual seconds.
    drivers: int
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)


def simulate(seed: int, likely: str = "") -> Outcome:
    """Run one schedule. The fault `likely` strikes more often than in the seed's usual schedule.

    Raises Broken, Deadlock, Livelock or any other unexpected error of the run. A note on the error gives the seed and
    the last events.
    """
    loop = VirtualLoop()
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="megasync-sim-", dir=folder) as run_dir, _isolated(seed):
        world = World(seed, loop, Path(run_dir), likely)
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                return runner.run(world.run())
        except Exception as error:
            error.add_note(f"seed {seed}; the last events:\n" + "\n".join(world.laws.history[-40:]))
            raise
        finally:
            world.disk.free()


@contextmanager
def _isolated(seed: int) -> Iterator[None]:
    """Seed the global random state and disable logging, because a schedule causes thousands of failures."""
    disabled, state = logging.root.manager.disable, random.getstate()
    logging.disable(logging.CRITICAL)
    random.seed(seed)
    try:
        yield
    finally:
        logging.disable(disabled)
        random.setstate(state)


class Disk:
    """A disk that may be full: a limit on file sizes (RLIMIT_FSIZE), so that real writes fail half-way."""

    def __init__(self) -> None:
        # Whether the disk was full at any time since the present driver started.
        self.was_full = False
        self._usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, room: int) -> None:
        """Limit every file of this process to `room` bytes."""
        self.was_full = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, self._usual[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)


class World:
    """The state that survives a driver: the run directory, the configuration, the laws and the seed's decisions.

    `rows` is the size of the dataset. `poison` is the row whose requests kill their server, or None; `deadly` the one
    whose workflow kills or blocks its worker. `chats` is whether the workflow uses chats with tools.
    """

    rows = ROWS

    def __init__(self, seed: int, loop: VirtualLoop, run_dir: Path, likely: str = "") -> None:
        self.likely = likely
        self.chance = Chance(seed, likely)
        choice = self.chance.choice
        self.config = _config(choice)
        if choice.random() < 0.8 and likely != DEFAULT_TIMEOUTS:
            _shorten_timeouts(self.config)
        if FIRST_WITH_WORKERS <= seed < FIRST_COLOCATED:
            self.config.rollout.workers = choice.randint(1, 3)
        if FIRST_COLOCATED <= seed < FIRST_EXACT:
            _colocate(self.config)
        if seed >= FIRST_EXACT:
            _evaluate_exactly(self.config, random.Random(f"{seed} exact"))
        self.chats = choice.random() < 0.3
        row = choice.randrange(ROWS)
        self.poison = row if choice.random() < 0.1 else None
        self.deadly: int | None = None
        if self.config.rollout.workers and (choice.random() < 0.2 or likely == DEADLY_ROW):
            self.deadly = choice.randrange(ROWS)
        self.loop = loop
        self.run_dir = run_dir
        self.disk = Disk()
        self.laws = Laws(seed, loop.time, run_dir)

    async def run(self) -> Outcome:
        choice = self.chance.choice
        deaths = [choice.uniform(0.5, 15.0) for _ in range(choice.choice([0, 0, 1, 2]))]
        driver: Driver | None = None
        for number in range(1, MAX_DRIVERS + 1):
            if number > 1:
                self._change_config(choice)
            self._change_disk(choice, number)
            self.laws.note(f"driver {number} starts")
            unrecorded = driver is not None and driver.buffer.unrecorded
            try:
                driver = Driver(self, number)
            except (LedgerError, CheckpointError) as error:
                if not self.disk.was_full or str(self.run_dir) not in str(error):
                    raise
                self.laws.note(f"driver {number} does not start, its disk is full: {type(error).__name__}")
                continue
            self.laws.pacing = Pacing.of(self.config.schedule)
            self.laws.samples = self.config.schedule.samples_per_group
            self.laws.driver_died(driver.buffer.process._state.status.newest_version if unrecorded else None)
            ended = await driver.run(deaths.pop() if deaths else None)
            if ended is not None:
                return Outcome(
                    seed=self.chance.seed,
                    ended=ended,
                    steps=driver.progress.step,
                    versions=driver.progress.version,
                    drivers=number,
                    seconds=self.loop.time(),
                    faults={kind: met for kind, met in self.chance.met.items() if met},
                    history=self.laws.history,
                )
        self.laws.fail(f"the run is not over after {MAX_DRIVERS} drivers")

    def _change_config(self, choice: random.Random) -> None:
        """Change some of the settings that `megasync resume RUN key=value` may change, in some of the resumes."""
        if choice.random() < 0.5 and self.likely not in RESUMABLE:
            return
        other = _config(choice)
        other.schedule.total_steps = self.config.schedule.total_steps + choice.randint(0, 3)
        other.schedule.samples_per_group = choice.randint(2, 3)
        for key in RESUMABLE:
            section, _, name = key.partition(".")
            current, value = getattr(self.config, section), getattr(getattr(other, section), name)
            drawn = choice.random() < 0.3 or key == self.likely
            if drawn and getattr(current, name) != value:
                self.laws.note(f"resumed with {key}={value}")
                self.chance.met[f"resumed with another {key}"] += 1
                setattr(current, name, value)
        if self.config.cluster.colocate:
            _colocate(self.config)

    def _change_disk(self, choice: random.Random, driver: int) -> None:
        """Free the disk before a driver starts, or, rarely, fill it."""
        self.disk.was_full = False
        full = choice.random() < 0.03 and driver <= FAULTY_DRIVERS
        self.disk.free()
        if full:
            self.laws.note("the disk is full")
            self.disk.fill(choice.choice([0, 4096, 40_000]))


def _config(choice: random.Random) -> Config:
    """Draw the configuration of a small run: events that are rare in a large run are frequent in it."""
    config = Config()
    schedule = config.schedule
    schedule.total_steps = choice.randint(3, 8)
    schedule.groups_per_step = choice.randint(1, 3)
    schedule.samples_per_group = 2
    schedule.max_staleness = choice.randint(0, 2)
    schedule.weight_sync_steps = choice.choice([1, 1, 2, 3])
    schedule.window_fraction = choice.choice([None, 0.3, 1.0])
    schedule.stale = choice.choice(["mask", "regenerate", "drop"])
    schedule.partial_rollout = choice.random() < 0.7
    schedule.max_inflight_groups = choice.choice([None, 2])
    config.rollout.servers = choice.randint(1, 3)
    config.rollout.stream_interval = choice.choice([0, 1, 2])
    config.rollout.save_partials_seconds = choice.choice([0.0, 0.3, 2.0])
    config.rollout.kv_pressure = choice.choice([None, 0.9])
    config.rollout.sampling.max_new_tokens = MOST_TOKENS
    config.rollout.chat.tool_format = "hermes"
    config.checkpoint.every_steps = choice.randint(0, 3)
    config.checkpoint.keep = choice.randint(1, 2)
    config.eval.every_steps = choice.randint(0, 3)
    return config


def _colocate(config: Config) -> None:
    config.cluster.colocate = True
    config.schedule.max_staleness, config.schedule.weight_sync_steps = 0, 1


def _evaluate_exactly(config: Config, choice: random.Random) -> None:
    config.eval.exact = True
    config.eval.every_steps = choice.randint(1, 2)
    config.eval.servers = choice.randint(1, 2)
    config.rollout.servers = choice.choice([1, 2, 2, 3, 3])
    config.rollout.workers = choice.choice([0, 0, 1, 2])


def _shorten_timeouts(config: Config) -> None:
    """Make hangs detectable within seconds or minutes."""
    health, timeouts = config.rollout.health, config.timeouts
    health.probe_seconds, health.probe_timeout, health.probe_failures = 0.5, 1.0, 2
    health.request_seconds, health.request_timeout, health.request_failures = 1.0, 2.0, 2
    timeouts.rollout_worker, timeouts.shutdown = 5.0, 5.0
    timeouts.request, timeouts.no_progress, timeouts.train_step, timeouts.weight_sync = 60.0, 300.0, 10.0, 6.0
