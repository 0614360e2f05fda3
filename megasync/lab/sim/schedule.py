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

from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.config.pacing import Pacing
from megasync.errors import CheckpointError, LedgerError
from megasync.lab.sim.clock import VirtualLoop
from megasync.lab.sim.driver import FAULTY_DRIVERS, Driver
from megasync.lab.sim.world import World

# The run directory is in memory if possible: writing ledger and checkpoints is a thousand times faster there.
SHARED_MEMORY = Path("/dev/shm")
# Maximum drivers of a run. Once the faults have ceased, the remaining drivers must finish it.
MAX_DRIVERS = 20


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
                return runner.run(_run(world))
        except Exception as error:
            error.add_note(f"seed {seed}; the last events:\n" + "\n".join(world.invariants.history[-40:]))
            raise
        finally:
            world.disk.free()


async def _run(world: World) -> Outcome:
    """Run drivers over one run directory until one of them ends the run."""
    choice = world.chance.choice
    deaths = [choice.uniform(0.5, 15.0) for _ in range(choice.choice([0, 0, 1, 2]))]
    for number in range(1, MAX_DRIVERS + 1):
        if number > 1:
            world.change_config(choice)
        world.change_disk(choice, faulty=number <= FAULTY_DRIVERS)
        world.invariants.note(f"driver {number} starts")
        try:
            driver = Driver(world, number)
        except (LedgerError, CheckpointError) as error:
            if not world.disk.was_full or str(world.run_dir) not in str(error):
                raise
            world.invariants.note(f"driver {number} does not start, its disk is full: {type(error).__name__}")
            continue
        world.invariants.pacing = Pacing.of(world.config.schedule)
        world.invariants.samples = world.config.schedule.samples_per_group
        world.invariants.driver_died(driver.buffer._state.status.newest_version)
        ended = await driver.run(deaths.pop() if deaths else None)
        if ended is not None:
            return Outcome(
                seed=world.chance.seed,
                ended=ended,
                steps=driver.progress.step,
                versions=driver.progress.version,
                drivers=number,
                seconds=world.loop.time(),
                faults={kind: met for kind, met in world.chance.met.items() if met},
                history=world.invariants.history,
            )
        world.disk.free()
        world.invariants.survives(world.run_dir / LEDGER_FILE)
    world.invariants.fail(f"the run is not over after {MAX_DRIVERS} drivers")


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
