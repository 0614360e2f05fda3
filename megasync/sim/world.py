"""One schedule, from its seed to its end: drivers that live, are killed and resumed, over one run directory."""

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

from megasync.buffer.pacing import Pacing
from megasync.config import Config
from megasync.sim.chance import Chance
from megasync.sim.clock import VirtualLoop
from megasync.sim.laws import Laws
from megasync.sim.life import Life

# In memory where there is such a place: a schedule writes its ledger and checkpoints a thousand times faster there.
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Outcome:
    """How a schedule ended: "finished", "stopped" (asked to), or the reason with which the run gave up."""

    seed: int
    ended: str
    steps: int
    versions: int
    # Drivers that it took, and virtual seconds.
    lives: int
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)


def simulate(seed: int) -> Outcome:
    """Runs one schedule.

    Raises Broken, Deadlock, Livelock or whatever else the run should not have raised, with a note that tells the seed and
    what happened last.
    """
    loop = VirtualLoop()
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="megasync-sim-", dir=folder) as run_dir, _alone(seed):
        world = World(seed, loop, Path(run_dir))
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                return runner.run(world.run())
        except Exception as error:
            error.add_note(f"seed {seed}; the last events:\n" + "\n".join(world.laws.history[-40:]))
            raise


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    """Without the process's own randomness, and without its log: a schedule makes thousands of things fail."""
    disabled, state = logging.root.manager.disable, random.getstate()
    logging.disable(logging.CRITICAL)
    random.seed(seed)
    try:
        yield
    finally:
        logging.disable(disabled)
        random.setstate(state)


class World:
    """What outlives a driver: the run directory, the configuration, the laws, and the seed's decisions."""

    def __init__(self, seed: int, loop: VirtualLoop, run_dir: Path) -> None:
        self.chance = Chance(seed)
        self.config = _config(self.chance.choice)
        self.loop = loop
        self.run_dir = run_dir
        self.laws = Laws(Pacing.of(self.config.schedule), loop.time)

    async def run(self) -> Outcome:
        choice = self.chance.choice
        deaths = [choice.uniform(0.5, 15.0) for _ in range(choice.choice([0, 0, 1, 2]))]
        life, ended = 0, None
        while ended is None:
            life += 1
            self.laws.note(f"driver {life} starts")
            self.laws.driver_died()
            here = Life(self, life)
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
    # A wedged server is known after a few seconds.
    health = config.rollout.health
    health.probe_seconds, health.probe_timeout, health.probe_failures = 0.5, 1.0, 2
    health.request_seconds, health.request_timeout, health.request_failures = 1.0, 2.0, 2
    config.checkpoint.every_steps = choice.randint(0, 3)
    config.checkpoint.keep = choice.randint(1, 2)
    config.eval.every_steps = choice.randint(0, 3)
    if choice.random() < 0.5:
        # Tight ones: what hangs is found soon. The others are the defaults.
        timeouts = config.timeouts
        timeouts.train_step, timeouts.weight_sync, timeouts.request, timeouts.no_progress = 10.0, 6.0, 60.0, 300.0
    return config
