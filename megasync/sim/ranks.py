"""Trainer ranks that know only which groups their weights have seen, and die, hang and come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megasync.buffer.trajectory import Group
from megasync.errors import RankLost
from megasync.sim.chance import Chance
from megasync.sim.laws import INITIAL, Laws, Weights

TRAIN_SECONDS, SAVE_SECONDS, START_SECONDS = 0.2, 0.1, 1.0
# Deadline of a collective: a rank that hangs is known by then.
HANG_SECONDS = 10.0


class Checkpoint(NamedTuple):
    path: Path
    oldest_step: int
    step: int
    weights: Weights
    state: str


class SimRanks:
    """`checkpoints` outlive the ranks, as a disk does; the newest `keep` are kept."""

    def __init__(self, chance: Chance, laws: Laws, keep: int) -> None:
        self._chance = chance
        self._laws = laws
        self._keep = keep
        self._dead = asyncio.Event()
        self.weights: Weights = INITIAL
        self.checkpoints: list[Checkpoint] = []
        # How often these ranks were started; the links of a transport belong to one start.
        self.starts = 1

    def kill(self) -> None:
        self._dead.set()

    async def step(self, groups: Sequence[Group], step: int, version: int) -> dict[str, float]:
        about = f"step {step}"
        self._laws.trains(self.weights, step, version, groups)
        self._laws.note(f"ranks train {about} on {', '.join(group.uid for group in groups)}")
        if self._chance.happens("rank hangs in a step", about):
            await self.work(about, HANG_SECONDS)
            self.kill()
        dies = self._chance.happens("rank dies in a step", about)
        await self.work(about, self._chance.seconds("train", TRAIN_SECONDS, about))
        if dies:
            self.kill()
        await self.work(about, 0.0)
        self.weights += tuple(group.uid for group in groups)
        return {"train/loss": 0.0}

    async def save(self, step: int, state: dict[str, Any]) -> Checkpoint:
        about = f"save {step}"
        if self._chance.happens("rank dies before a save", about):
            self.kill()
        await self.work(about, self._chance.seconds("train", SAVE_SECONDS, about))
        steps = [kept.step for kept in self.checkpoints]
        self._laws.need(step not in steps, f"step {step} is saved again; {steps} are kept")
        kept = [*self.checkpoints, Checkpoint(Path(about), 0, step, self.weights, json.dumps(state))][-self._keep :]
        self.checkpoints = [saved._replace(oldest_step=kept[0].step) for saved in kept]
        self._laws.note(f"ranks have saved step {step}")
        if self._chance.happens("rank dies after a save", about):
            self.kill()
        await self.work(about, 0.0)
        return self.checkpoints[-1]

    async def check(self) -> None:
        await self.work("check", 0.01)

    async def restart(self) -> dict[str, Any] | None:
        self._dead.set()
        self._dead = asyncio.Event()
        self.starts += 1
        about = f"start {self.starts}"
        if self._chance.happens("rank dies while it starts", about):
            self.kill()
        await self.work(about, self._chance.seconds("train", START_SECONDS, about))
        saved = self.checkpoints[-1] if self.checkpoints else None
        self.weights = saved.weights if saved else INITIAL
        self._laws.note(f"ranks have started again from step {saved.step if saved else 0}")
        return json.loads(saved.state) if saved else None

    async def work(self, what: str, seconds: float) -> None:
        """Time in which a rank may die. Raises RankLost as soon as one does."""
        try:
            async with asyncio.timeout(seconds or None):
                if seconds or self._dead.is_set():
                    await self._dead.wait()
        except TimeoutError:
            return
        if self._dead.is_set():
            raise RankLost(f"a rank died during {what}")
