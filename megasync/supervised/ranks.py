"""Trainer ranks of a supervised run: beside what all ranks do, they train on rows of a file in the run folder."""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megasync.cluster.pools import Pools
from megasync.cluster.trainer_group import TrainerGroup
from megasync.config import Config
from megasync.observe import trace
from megasync.observe.context import RunContext
from megasync.supervised.row_file import RowFile
from megasync.trainer.rank import TrainerRank

if TYPE_CHECKING:
    from megasync.supervised.step import SupervisedTrainer


class SupervisedTrainerRank(TrainerRank):
    """One of the ranks; its methods are collectives, as those of every rank."""

    @cached_property
    def _supervised(self) -> SupervisedTrainer:
        from megasync.supervised.step import SupervisedTrainer

        return SupervisedTrainer(self._learner)

    def fit(self, file: str, rows: NDArray[np.int64], step: int) -> dict[str, float]:
        """Runs one supervised step on rows of a file in the run folder; returns the same metrics on every rank."""
        with trace.span("step", "step", step=step), self._profiled(step):
            return self._supervised.step(self._rows(file), rows, step)

    def loss(self, file: str) -> float:
        """The mean negative log-prob of the trained tokens of all rows of a file in the run folder."""
        return self._supervised.loss(self._rows(file))

    @lru_cache(maxsize=2)  # noqa: B019 - a rank lives as long as its process
    def _rows(self, file: str) -> RowFile:
        return RowFile(self._run_dir / file)


class SupervisedGroup(TrainerGroup):
    """All ranks of a supervised run."""

    def __init__(self, config: Config, run_dir: Path, pools: Pools, context: RunContext) -> None:
        super().__init__(config, run_dir, pools, context, SupervisedTrainerRank)

    async def fit(self, file: str, rows: NDArray[np.int64], step: int) -> dict[str, float]:
        with trace.span("trainer", "train", step=step):
            return (await self.on_all(self._timeouts.train_step, SupervisedTrainerRank.fit, file, rows, step))[0]

    async def loss(self, file: str) -> float:
        with trace.span("trainer", "validate"):
            return (await self.on_all(self._timeouts.train_step, SupervisedTrainerRank.loss, file))[0]
