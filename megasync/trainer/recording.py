"""Records the responses of a trained step in `observe.rollouts`: each rank those that it has computed, and no others.

Every rank chooses the same groups by their uids. Of these, a response is recorded by the rank whose counted microbatch
holds it; tensor and context peers and earlier pipeline stages hold the same and record nothing. A response that no rank
computes, because it has no gradient, is recorded by the data-parallel rank to which its group falls. So each has one
writer, without communication.

Log-probs and advantages are those that the loss was computed from: what is recorded costs no pass over the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megasync.buffer.payload import LeasedGroup
from megasync.observe.rollouts import IndexRow, Response, RolloutLog, chosen, recorded
from megasync.trainer.learner import MegatronLearner
from megasync.trainer.tables import Minibatch, Step, TrajectoryTable
from megasync.trajectory import Trajectory

log = logging.getLogger(__name__)


class Recorder:
    """Records up to ``most`` responses of each step, in whole groups."""

    def __init__(self, log: RolloutLog, most: int, learner: MegatronLearner) -> None:
        self._log = log
        self._most = most
        coords = learner.coords
        self._writes = learner.is_last_stage and not (coords.tp or coords.cp)
        self._data_rank = coords.dp, learner.topology.data
        # Positions of the chosen groups in the step.
        self._groups: frozenset[int] = frozenset()

    def begin(self, groups: Sequence[LeasedGroup]) -> None:
        """Chooses the groups of a step."""
        if self._writes:
            self._groups = frozenset(
                chosen([(group.uid, len(group.header.trajectories)) for group in groups], self._most)
            )

    def takes(self, group: int) -> bool:
        """Whether this rank records its responses of a group."""
        return group in self._groups

    def record(self, step: Step) -> None:
        """Records this rank's responses of a step. Never raises."""
        if not self._groups:
            return
        try:
            computed = [row for minibatch in step.minibatches for row in _computed(step, minibatch)]
            self._log.append([*computed, *self._not_computed(step)])
        except Exception as error:  # noqa: BLE001 - recording must not end a training step
            log.warning("Could not record the responses of step %d: %s: %s", step.number, type(error).__name__, error)

    def _not_computed(self, step: Step) -> Iterator[tuple[IndexRow, Response]]:
        computed = {number for minibatch in step.minibatches for number in minibatch.trajectories.numbers.tolist()}
        rank, ranks = self._data_rank
        trajectories = step.trajectories
        for group in sorted(self._groups):
            if group % ranks != rank:
                continue
            first, end = np.searchsorted(trajectories.groups, [group, group + 1]).tolist()
            left = [row for row in range(first, end) if int(trajectories.numbers[row]) not in computed]
            for row, trajectory in trajectories.load(step.groups, left, step.load).items():
                yield _recorded(step, trajectories, row, trajectory)


def _computed(step: Step, minibatch: Minibatch) -> Iterator[tuple[IndexRow, Response]]:
    """Yields the responses of a minibatch that this rank has computed and remembers in ``recorded``."""
    for table in minibatch.tables:
        if not table.counted or minibatch.recorded.keys().isdisjoint(table.rows.tolist()):
            continue
        columns = table.columns
        # Without an optimizer step, as while a critic warms up, no loss was computed from the scores.
        values = (None, columns.get("token_advantages"))
        if "advantages" in columns:
            values = (columns["old"], columns["advantages"])
        scores, advantages = (_split(each, table.counts) for each in values)
        for place, row in enumerate(table.rows.tolist()):
            if (trajectory := minibatch.recorded.get(row)) is None:
                continue
            of_tokens = None if advantages is None else advantages[place]
            # Most estimators give a response one advantage, which the row has.
            if of_tokens is not None and (of_tokens == of_tokens[:1]).all():
                of_tokens = None
            each = None if scores is None else scores[place]
            yield _recorded(step, minibatch.trajectories, row, trajectory, each, of_tokens)


def _recorded(
    step: Step,
    trajectories: TrajectoryTable,
    row: int,
    trajectory: Trajectory,
    scores: NDArray[np.float32] | None = None,
    advantages: NDArray[np.float32] | None = None,
) -> tuple[IndexRow, Response]:
    return recorded(
        *(step.groups[int(trajectories.groups[row])].uid, int(trajectories.places[row]), trajectory),
        step=step.number,
        version=step.version,
        time=time.time(),
        advantage=float(trajectories.advantages[row]),
        scores=scores,
        advantages=advantages,
    )


def _split(values: torch.Tensor | None, counts: NDArray[Any]) -> list[NDArray[np.float32]] | None:
    """Values of the targets of a microbatch, by sequence."""
    if values is None:
        return None
    return np.split(values.float().cpu().numpy(), np.cumsum(counts[:-1]))
