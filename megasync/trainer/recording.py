"""Records the responses of a trained step in `observe.rollouts`: each rank those that it has computed, and no others.

Every rank chooses the same groups by their uids. Of these, a response is recorded by the rank whose counted microbatch
holds it; tensor and context peers and earlier pipeline stages hold the same and record nothing. A response that no rank
computes, because it has no gradient, is recorded by the data-parallel rank on whose turn its group is. So each has one
writer, without communication.

Log-probs and advantages are those that the loss was computed from: what is recorded costs no pass over the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from megasync.buffer.payload import LeasedGroup
from megasync.observe.rollouts import Response, RolloutLog, Row, chosen, recorded
from megasync.trainer.engine import MegatronEngine
from megasync.trainer.members import Members
from megasync.trajectory import Trajectory

if TYPE_CHECKING:
    from megasync.trainer.policy import Minibatch

log = logging.getLogger(__name__)

# Loads some trajectories of a group, by their positions in its header.
Loader = Callable[[LeasedGroup, Sequence[int]], Sequence[Trajectory]]


class Recorder:
    """Records up to ``most`` responses of each step, in whole groups."""

    def __init__(self, log: RolloutLog, most: int, engine: MegatronEngine) -> None:
        self._log = log
        self._most = most
        coords = engine.coords
        self._writes = engine.is_last_stage and not (coords.tp or coords.cp)
        self._turn = coords.dp, engine.topology.data
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

    def record(
        self,
        groups: Sequence[LeasedGroup],
        members: Members,
        minibatches: Sequence[Minibatch],
        load: Loader,
        step: int,
        version: int,
    ) -> None:
        """Records this rank's responses of a step. Never raises."""
        if not self._groups:
            return
        try:
            computed = [row for minibatch in minibatches for row in _computed(groups, minibatch, step, version)]
            rest = self._not_computed(groups, members, minibatches, load, step, version)
            self._log.append([*computed, *rest])
        except Exception as error:  # noqa: BLE001 - recording must not end a training step
            log.warning("Could not record the responses of step %d: %s: %s", step, type(error).__name__, error)

    def _not_computed(
        self,
        groups: Sequence[LeasedGroup],
        members: Members,
        minibatches: Sequence[Minibatch],
        load: Loader,
        step: int,
        version: int,
    ) -> Iterator[tuple[Row, Response]]:
        computed = {number for minibatch in minibatches for number in minibatch.members.numbers.tolist()}
        own, ranks = self._turn
        for group in sorted(self._groups):
            if group % ranks != own:
                continue
            first, end = np.searchsorted(members.groups, [group, group + 1]).tolist()
            left = [index for index in range(first, end) if int(members.numbers[index]) not in computed]
            places = members.places[left].tolist()
            for index, place, trajectory in zip(left, places, load(groups[group], places) if left else (), strict=True):
                yield recorded(
                    *(groups[group].uid, place, trajectory),
                    step=step,
                    version=version,
                    time=time.time(),
                    advantage=float(members.advantages[index]),
                )


def _computed(
    groups: Sequence[LeasedGroup], minibatch: Minibatch, step: int, version: int
) -> Iterator[tuple[Row, Response]]:
    """What this rank has computed of a minibatch and remembers in ``kept``."""
    members = minibatch.members
    for number, microbatch in enumerate(minibatch.share.microbatches):
        own = list(microbatch.sequences)
        if not microbatch.counted or minibatch.kept.keys().isdisjoint(own):
            continue
        counts = minibatch.counts(own)
        # Without an optimizer step, as while a critic warms up, nothing was scored.
        estimated = None if minibatch.advantages is None else minibatch.advantages[number]
        scores, of_tokens = (_split(values, counts) for values in minibatch.scored.get(number, (None, estimated)))
        for place, index in enumerate(own):
            if (trajectory := minibatch.kept.get(index)) is None:
                continue
            advantages = None if of_tokens is None else of_tokens[place]
            yield recorded(
                *(groups[int(members.groups[index])].uid, int(members.places[index]), trajectory),
                step=step,
                version=version,
                time=time.time(),
                advantage=float(members.advantages[index]),
                scores=None if scores is None else scores[place],
                # Most estimators give a response one advantage, which the row has.
                advantages=None if advantages is None or (advantages == advantages[:1]).all() else advantages,
            )


def _split(values: torch.Tensor | None, counts: Sequence[int]) -> list[NDArray[np.float32]] | None:
    """Values of the targets of a microbatch, by sequence."""
    if values is None:
        return None
    return np.split(values.float().cpu().numpy(), np.cumsum(counts[:-1]))
