"""Simulated trainer ranks. Their weights are the groups of each step trained so far; they die, hang and restart."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasync.buffer.payload import LeasedGroup
from megasync.cluster.trainer_group import Saved
from megasync.errors import CheckpointError, RankLost, TrainingError, raised_as
from megasync.lab.sim.chance import Chance
from megasync.lab.sim.invariants import INITIAL, Invariants, Weights
from megasync.trainer import checkpoint

TRAIN_SECONDS, SAVE_SECONDS, START_SECONDS, TURN_SECONDS = 0.2, 0.1, 1.0, 0.05
WEIGHTS = "weights.json"
DATA_PARALLEL = 2


class SimRanks:
    """All trainer ranks as one object.

    Their checkpoints are folders in the run directory, as in a real run, and contain the history of the weights. A hung
    rank is detected after `deadline` seconds (`timeouts.train_step`).
    """

    def __init__(self, chance: Chance, invariants: Invariants, run_dir: Path, keep: int, deadline: float) -> None:
        self._chance = chance
        self._invariants = invariants
        self._run_dir = run_dir
        self._keep = keep
        self._deadline = deadline
        self._dead = asyncio.Event()
        self.weights: Weights = INITIAL
        # The checkpoint that is being written: its step, state and weights, and when it is.
        self._saving: tuple[int, dict[str, Any], Weights, float] | None = None
        self.data_parallel = DATA_PARALLEL
        # How many times the ranks were started. A transport's connections are valid for one start only.
        self.starts = 1
        self._whole = True
        invariants.takes_device("ranks")
        self.load()

    def load(self) -> Path | None:
        """Load the newest checkpoint, or the initial weights if there is none. Returns the path of the checkpoint."""
        newest = checkpoint.latest(self._run_dir)
        self.weights = INITIAL if newest is None else _read(newest)
        return newest

    def kill(self) -> None:
        self._dead.set()

    async def offload(self) -> None:
        await self.work("offload", self._chance.seconds("train", TURN_SECONDS, f"offload {self.starts}"))
        self._whole = False
        self._invariants.leaves_device("ranks")

    async def restore(self) -> None:
        self._invariants.takes_device("ranks")
        await self.work("restore", self._chance.seconds("train", TURN_SECONDS, f"restore {self.starts}"))
        self._whole = True

    async def step(self, groups: Sequence[LeasedGroup], step: int, version: int) -> dict[str, float]:
        about = f"step {step}"
        self._invariants.need(self._whole, f"{about} begins on ranks that are not offloaded")
        self._invariants.trains(self.weights, step, version, groups)
        self._invariants.note(f"ranks train {about} on {', '.join(group.uid for group in groups)}")
        if self._chance.happens("rank hangs in a step", about):
            await self.work(about, self._deadline)
            self.kill()
        dies = self._chance.happens("rank dies in a step", about)
        await self.work(about, self._chance.seconds("train", TRAIN_SECONDS, about))
        if dies:
            self.kill()
        await self.work(about, 0.0)
        if raising := [group.uid for group in groups if self._chance.always("step raises", group.uid)]:
            self._invariants.raises(raising[0])
            raise TrainingError(f"group {raising[0]} cannot be trained")
        self.weights += (tuple(group.uid for group in groups),)
        return {"train/loss": 0.0}

    async def begin_save(self, step: int, state: dict[str, Any]) -> None:
        about = f"save {step}"
        self._invariants.need(self._whole, f"{about} begins on ranks that are not offloaded")
        self._invariants.need(self._saving is None, f"step {step} is saved before the save of another one ended")
        if self._chance.happens("rank dies before a save", about):
            self.kill()
        await self.work(about, 0.0)
        ready = asyncio.get_running_loop().time() + self._chance.seconds("train", SAVE_SECONDS, about)
        self._saving = step, dict(state), self.weights, ready

    async def finish_save(self, wait: bool) -> Saved | None:
        assert self._saving is not None
        step, state, weights, ready = self._saving
        about, left = f"save {step}", ready - asyncio.get_running_loop().time()
        await self.work(about, max(left, 0.0) if wait else 0.0)
        if left > 0 and not wait:
            return None
        self._saving = None
        path = checkpoint.step_path(self._run_dir, step)
        self._invariants.need(not path.exists(), f"step {step} is saved again")
        with raised_as(CheckpointError, f"could not write checkpoint {path}"):
            self._write(path, state, weights)
        self._invariants.note(f"ranks have saved step {step}")
        if self._chance.happens("rank dies after a save", about):
            self.kill()
        await self.work(about, 0.0)
        checkpoint.prune(self._run_dir, self._keep)
        return Saved(path, checkpoint.step_of(checkpoint.complete(self._run_dir)[0]))

    def _write(self, path: Path, state: dict[str, Any], weights: Weights) -> None:
        partial = path.with_name(path.name + checkpoint.PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            (partial / WEIGHTS).write_text(json.dumps(weights))
            (partial / checkpoint.STATE).write_text(json.dumps(state))
            (partial / checkpoint.MARKER).touch()
        except OSError:
            shutil.rmtree(partial)
            raise
        partial.rename(path)

    async def check(self) -> None:
        await self.work("check", 0.01)

    async def restart(self) -> dict[str, Any] | None:
        self._dead.set()
        self._dead = asyncio.Event()
        self._saving = None
        self.starts += 1
        self._whole = True
        self._invariants.takes_device("ranks")
        about = f"start {self.starts}"
        if self._chance.happens("rank dies while it starts", about):
            self.kill()
        await self.work(about, self._chance.seconds("train", START_SECONDS, about))
        self.data_parallel = 1 if self._chance.happens("node is lost", about) else DATA_PARALLEL
        newest = self.load()
        self._invariants.note(f"ranks have started again from {newest.name if newest else 'the start'}")
        return None if newest is None else checkpoint.read_state(newest)

    async def can_grow(self) -> bool:
        return self.data_parallel < DATA_PARALLEL and self._chance.happens("node is back", f"start {self.starts}")

    async def work(self, what: str, seconds: float) -> None:
        """Spend `seconds`, during which a rank may die. Raises RankLost as soon as one does."""
        try:
            async with asyncio.timeout(seconds or None):
                if seconds or self._dead.is_set():
                    await self._dead.wait()
        except TimeoutError:
            return
        if self._dead.is_set():
            raise RankLost(f"a rank died during {what}")


def _read(path: Path) -> Weights:
    return tuple(map(tuple, json.loads((path / WEIGHTS).read_text())))
