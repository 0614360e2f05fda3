"""The trainer ranks as one: started together, called together, started again together, ended together."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasync.cluster.actors import Actors
from megasync.cluster.leftovers import end_leftovers
from megasync.cluster.pools import Pools
from megasync.config import Config
from megasync.errors import CheckpointError, MegasyncError, ProcessLost, RankLost
from megasync.trajectory import Group

log = logging.getLogger(__name__)

# How long a rank that has nothing to do may take to say that it lives.
ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was written, and the step of the oldest one that is kept beside it."""

    path: Path
    oldest_step: int


class TrainerGroup:
    """Every method reaches all ranks and returns rank 0's answer; `call` returns all of them.

    A rank that died or hangs makes any method raise RankLost. The others are of no use without it; `restart` ends them.
    """

    def __init__(self, config: Config, run_dir: Path, pools: Pools) -> None:
        self._config = config
        self._timeouts = config.timeouts
        self._run_dir = run_dir
        self._pools = pools
        self._pids: list[int] = []
        self._actors = self._create()

    def _create(self) -> Actors:
        world = self._pools.specs["trainer"].slots
        arguments = [(self._config, rank, world, str(self._run_dir)) for rank in range(world)]
        return Actors.create("trainer", arguments, pools=self._pools)

    async def start(self, checkpoint: Path | None) -> None:
        """Builds the ranks' process group and models; from `checkpoint` when one is given."""
        limit = self._timeouts.trainer_start
        self._pids = await self.call("pid", timeout=limit)
        host, port = (await self.call("rendezvous", timeout=limit))[0]
        await self.call("start", host, port, timeout=limit)
        if checkpoint is not None:
            await self.call("load", str(checkpoint), timeout=limit)

    async def restart(self) -> dict[str, Any] | None:
        """Ends what is left of the ranks and starts new ones in their places, from the run's newest whole checkpoint.

        Returns what that checkpoint was saved with; None when there is none and the ranks hold the initial weights.
        """
        from megasync.trainer import checkpoint

        self._actors.kill()
        await end_leftovers(self._pools, "trainer", self._pids, ANSWER_SECONDS)
        self._actors = self._create()
        newest = checkpoint.latest(self._run_dir)
        await self.start(newest)
        return None if newest is None else checkpoint.read_state(newest)

    async def check(self) -> None:
        """Raises RankLost when a rank is dead or does not answer. For when none is at work."""
        await self.call("pid", timeout=ANSWER_SECONDS)

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Rank by rank, what `TrainerRank.method` answered."""
        try:
            return await self._actors.call(method, *args, timeout=timeout)
        except ProcessLost as loss:
            raise RankLost(str(loss)) from loss

    async def step(self, groups: list[Group], step: int, version: int) -> dict[str, float]:
        return (await self.call("step", groups, step, version, timeout=self._timeouts.train_step))[0]

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence."""
        return (await self.call("logprobs", sequences, timeout=self._timeouts.train_step))[0]

    async def save(self, step: int, state: dict) -> Saved:
        """Writes the checkpoint of a step and removes older ones beyond `checkpoint.keep`.

        Raises:
            CheckpointError: it could not be written; says which earlier one the run can go on from.
        """
        from megasync.trainer import checkpoint

        path = checkpoint.step_path(self._run_dir, step)
        try:
            await self.call("save", str(path), state, timeout=self._timeouts.train_step)
        except CheckpointError as error:
            kept = checkpoint.latest(self._run_dir)
            way_on = (
                f"once it can be written, `megasync resume {self._run_dir}` goes on from {kept.name}"
                if kept
                else "there is no earlier one to go on from"
            )
            raise CheckpointError(f"{error}; {way_on}") from error
        await asyncio.to_thread(checkpoint.prune, self._run_dir, self._config.checkpoint.keep)
        return Saved(path, checkpoint.step_of(checkpoint.complete(self._run_dir)[0]))

    async def stop(self) -> None:
        """Asks the ranks to leave their groups, then ends their processes whatever they answered."""
        try:
            await self.call("stop", timeout=self._timeouts.shutdown)
        except (MegasyncError, asyncio.CancelledError) as error:
            log.debug("trainer ranks were ended without an answer: %r", error)
        finally:
            self._actors.kill()
