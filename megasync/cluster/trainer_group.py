"""The trainer ranks as one: started together, called together, ended together."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from megasync.buffer.trajectory import Group
from megasync.cluster.actors import Actors
from megasync.cluster.pools import Pools
from megasync.config import Config
from megasync.errors import CheckpointError, MegasyncError

log = logging.getLogger(__name__)


class TrainerGroup:
    """Every method reaches all ranks and returns rank 0's answer; `call` returns all of them."""

    def __init__(self, config: Config, run_dir: Path, pools: Pools) -> None:
        self._timeouts = config.timeouts
        self._keep = config.checkpoint.keep
        self._run_dir = run_dir
        world = pools.specs["trainer"].slots
        arguments = [(config, rank, world, str(run_dir)) for rank in range(world)]
        self._actors = Actors.create("trainer", arguments, pools=pools)

    async def start(self, checkpoint: Path | None) -> None:
        """Builds the ranks' process group and models; from `checkpoint` when one is given."""
        limit = self._timeouts.trainer_start
        host, port = await self._actors.call_one(0, "rendezvous", timeout=limit)
        await self._actors.call("start", host, port, timeout=limit)
        if checkpoint is not None:
            await self._actors.call("load", str(checkpoint), timeout=limit)

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        return await self._actors.call(method, *args, timeout=timeout)

    async def step(self, groups: list[Group], step: int, version: int) -> dict[str, float]:
        return (await self._actors.call("step", groups, step, version, timeout=self._timeouts.train_step))[0]

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence."""
        return (await self._actors.call("logprobs", sequences, timeout=self._timeouts.train_step))[0]

    async def save(self, step: int, state: dict) -> Path:
        """Writes the checkpoint of a step and removes older ones beyond `checkpoint.keep`.

        Raises:
            CheckpointError: it could not be written; says which earlier one the run can go on from.
        """
        from megasync.trainer import checkpoint

        path = checkpoint.step_path(self._run_dir, step)
        try:
            await self._actors.call("save", str(path), state, timeout=self._timeouts.train_step)
        except CheckpointError as error:
            kept = checkpoint.latest(self._run_dir)
            way_on = (
                f"once it can be written, `megasync resume {self._run_dir}` goes on from {kept.name}"
                if kept
                else "there is no earlier one to go on from"
            )
            raise CheckpointError(f"{error}; {way_on}") from error
        await asyncio.to_thread(checkpoint.prune, self._run_dir, self._keep)
        return path

    async def stop(self) -> None:
        """Asks the ranks to leave their groups, then ends their processes whatever they answered."""
        try:
            await self._actors.call("stop", timeout=self._timeouts.shutdown)
        except (MegasyncError, asyncio.CancelledError) as error:
            log.debug("trainer ranks were ended without an answer: %r", error)
        finally:
            self._actors.kill()
