"""What survives a simulated driver: run directory, configuration, invariants and the decisions of the seed."""

from __future__ import annotations

import random
import resource
from pathlib import Path

from megasync.config import Config
from megasync.lab.sim.chance import Chance
from megasync.lab.sim.clock import VirtualLoop
from megasync.lab.sim.invariants import Invariants
from megasync.lab.sim.language import MOST_TOKENS
from megasync.lab.sim.servers import POISON_ROW

ROWS = 7
# The fault of a row whose workflow kills or blocks its worker.
DEADLY_ROW = "row kills its process"
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
    """The state that survives a driver: the run directory, the configuration, the invariants and the seed's decisions.

    `rows` is the size of the dataset. `poison` is the row whose requests kill their server, or None; `deadly` the one
    whose workflow kills or blocks its worker. `chats` is whether the workflow uses chats with tools.
    """

    rows = ROWS

    def __init__(self, seed: int, loop: VirtualLoop, run_dir: Path, likely: str = "") -> None:
        self.likely = likely
        self.chance = Chance(seed, likely)
        choice = self.chance.choice
        self.config = _config(choice)
        # The invariants derive the tokens of each sample from its seed.
        self.config.seed, self.config.rollout.deterministic = seed, True
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
        self.poison = row if choice.random() < 0.1 or likely == POISON_ROW else None
        self.deadly: int | None = None
        if self.config.rollout.workers and (choice.random() < 0.2 or likely == DEADLY_ROW):
            self.deadly = choice.randrange(ROWS)
        self.loop = loop
        self.run_dir = run_dir
        self.disk = Disk()
        self.invariants = Invariants(seed, loop.time, run_dir)

    def change_config(self, choice: random.Random) -> None:
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
                self.invariants.note(f"resumed with {key}={value}")
                self.chance.met[f"resumed with another {key}"] += 1
                setattr(current, name, value)
        if self.config.cluster.colocate:
            _colocate(self.config)

    def change_disk(self, choice: random.Random, *, faulty: bool) -> None:
        """Free the disk before a driver starts, or, rarely and if the driver is `faulty`, fill it."""
        self.disk.was_full = False
        full = choice.random() < 0.03 and faulty
        self.disk.free()
        if full:
            self.invariants.note("the disk is full")
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
