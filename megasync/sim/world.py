"""One schedule of a seed: a sequence of drivers over one run directory, each killed or ended and then resumed."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasync.config import Config
from megasync.config.pacing import Pacing
from megasync.errors import CheckpointError, LedgerError
from megasync.sim.chance import Chance
from megasync.sim.clock import VirtualLoop
from megasync.sim.disk import Disk
from megasync.sim.language import MOST_TOKENS
from megasync.sim.laws import Laws
from megasync.sim.life import STORMY_LIVES, Life

# The run directory is in memory if possible: writing ledger and checkpoints is a thousand times faster there.
SHARED_MEMORY = Path("/dev/shm")
ROWS = 7
# Maximum drivers of a run. Once the faults have ceased, the remaining drivers must finish it.
MOST_LIVES = 20
DEFAULT_TIMEOUTS = "default timeouts"
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

# Faults that a run cannot handle yet; they are excluded from all schedules.
ABSENT: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """The result of a schedule.

    `ended` is "finished", "stopped" (a stop was requested) or the reason for which the run gave up.
    """

    seed: int
    ended: str
    steps: int
    versions: int
    # Number of drivers, and virtual seconds.
    lives: int
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
    with tempfile.TemporaryDirectory(prefix="megasync-sim-", dir=folder) as run_dir, _alone(seed):
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
def _alone(seed: int) -> Iterator[None]:
    """Seed the global random state and disable logging, because a schedule causes thousands of failures."""
    disabled, state = logging.root.manager.disable, random.getstate()
    logging.disable(logging.CRITICAL)
    random.seed(seed)
    try:
        yield
    finally:
        logging.disable(disabled)
        random.setstate(state)


class World:
    """The state that survives a driver: the run directory, the configuration, the laws and the seed's decisions.

    `rows` is the size of the dataset. `poison` is the row whose requests kill their server, or None. `chats` is whether
    the workflow uses chats with tools. `absent` are the faults excluded from all schedules.
    """

    rows = ROWS

    def __init__(self, seed: int, loop: VirtualLoop, run_dir: Path, likely: str = "") -> None:
        self.absent = ABSENT
        # Number of the present driver.
        self.life = 0
        self.likely = likely
        self.chance = Chance(seed, likely)
        choice = self.chance.choice
        self.config = _config(choice)
        tight = choice.random() < 0.8 and likely != DEFAULT_TIMEOUTS
        if tight or DEFAULT_TIMEOUTS in self.absent:
            _hasten(self.config)
        self.chats = choice.random() < 0.3
        self.poison = self._sometimes("prompt kills servers", choice.randrange(ROWS), 0.1)
        self.loop = loop
        self.run_dir = run_dir
        self.disk = Disk()
        self.laws = Laws(seed, loop.time, run_dir)

    def _sometimes(self, fault: str, row: int, probability: float) -> int | None:
        drawn = self.chance.choice.random() < probability
        return row if drawn and fault not in self.absent else None

    async def run(self) -> Outcome:
        choice = self.chance.choice
        deaths = [choice.uniform(0.5, 15.0) for _ in range(choice.choice([0, 0, 1, 2]))]
        life, ended, here = 0, None, None
        while ended is None:
            life += 1
            self.life = life
            self.laws.need(life <= MOST_LIVES, f"the run is not over after {MOST_LIVES} drivers")
            if life > 1:
                self._change(choice)
            self._room(choice)
            self.laws.note(f"driver {life} starts")
            unrecorded = here is not None and here.buffer.unrecorded
            try:
                here = Life(self, life)
            except (LedgerError, CheckpointError) as error:
                if not self.disk.was_full or str(self.run_dir) not in str(error):
                    raise
                self.laws.note(f"driver {life} does not start, its disk is full: {type(error).__name__}")
                continue
            self._prepare(here, unrecorded)
            ended = await here.run(deaths.pop() if deaths else None)
        faults = {kind: met for kind, met in self.chance.met.items() if met}
        return Outcome(
            self.chance.seed,
            ended,
            here.progress.step,
            here.progress.version,
            life,
            self.loop.time(),
            faults,
            self.laws.history,
        )

    def _change(self, choice: Any) -> None:
        """Change some of the settings that `megasync resume RUN key=value` may change, in some of the resumes."""
        if choice.random() < 0.5 and self.likely not in RESUMABLE:
            return
        other = _config(choice)
        other.schedule.total_steps = self.config.schedule.total_steps + choice.randint(0, 3)
        other.schedule.samples_per_group = choice.randint(2, 3)
        for key in RESUMABLE:
            section, _, name = key.partition(".")
            mine, value = getattr(self.config, section), getattr(getattr(other, section), name)
            drawn = choice.random() < 0.3 or key == self.likely
            if drawn and key not in self.absent and getattr(mine, name) != value:
                self.laws.note(f"resumed with {key}={value}")
                self.chance.met[f"resumed with another {key}"] += 1
                setattr(mine, name, value)

    def _room(self, choice: Any) -> None:
        """Free the disk before a driver starts, or, rarely, fill it."""
        self.disk.watch()
        full = "disk is full" not in self.absent and choice.random() < 0.03 and self.life <= STORMY_LIVES
        self.disk.free()
        if full:
            self.laws.note("the disk is full")
            self.disk.fill(choice.choice([0, 4096, 40_000]))

    def _prepare(self, life: Life, unrecorded: bool) -> None:
        """Give the laws the settings of this driver."""
        self.laws.pacing = Pacing.of(self.config.schedule)
        self.laws.samples = self.config.schedule.samples_per_group
        newest = life.buffer.process._state.status.newest_version if unrecorded else None
        self.laws.driver_died(newest)


def _config(choice: Any) -> Config:
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


def _hasten(config: Config) -> None:
    """Shorten the timeouts so that hangs are detected within seconds or minutes."""
    health, timeouts = config.rollout.health, config.timeouts
    health.probe_seconds, health.probe_timeout, health.probe_failures = 0.5, 1.0, 2
    health.request_seconds, health.request_timeout, health.request_failures = 1.0, 2.0, 2
    timeouts.request, timeouts.no_progress, timeouts.train_step, timeouts.weight_sync = 60.0, 300.0, 10.0, 6.0
