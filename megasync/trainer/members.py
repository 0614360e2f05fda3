"""The trajectories of a training step as arrays, and the advantages of their samples; from headers alone.

Every rank computes the same from the headers of all groups, without communication and without reading a token. Rewards
are those of samples, and so are advantages: each trajectory gets that of its sample (`algorithms.advantages.rewards`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasync.algorithms.advantages.rewards import StepRewards
from megasync.algorithms.choose import estimator_of, needs_baseline, needs_two
from megasync.buffer.payload import LeasedGroup
from megasync.config.schema import AlgorithmConfig
from megasync.errors import TrainingError
from megasync.trainer.packing import Ints, Lengths
from megasync.trajectory import BASELINE, by_sample, of_sample


@dataclass(frozen=True)
class Members:
    """The trajectories of a step that have a reward, in order, as arrays [trajectories]; from headers alone.

    ``numbers`` are the positions of trajectories in the step, ``groups`` and ``places`` the position of a trajectory's
    group, and its own within the group's header. ``samples``, ascending, are the positions of their samples in the
    step. ``trained`` are numbers of trained tokens, ``sequences`` those of what the loss takes for one sequence: the
    trajectory, or its whole sample (`algorithm.sample_weight`). ``advantages`` are those of the samples, 0 if those of
    tokens are estimated.
    """

    numbers: Ints
    groups: Ints
    places: Ints
    samples: Ints
    advantages: NDArray[np.float64]
    trained: Ints
    sequences: Ints
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, selection: Ints) -> Members:
        return Members(*(getattr(self, item.name)[selection] for item in fields(self)))


def members_of(
    groups: Sequence[LeasedGroup], algorithm: AlgorithmConfig, of_tokens: bool
) -> tuple[Members, StepRewards]:
    """The trajectories with a reward, sample by sample, and the rewards of the samples.

    Raises TrainingError for groups that the estimator cannot use.
    """
    weights = {name: weight for group in groups for name, weight in group.header.weights.items()}
    parts: dict[str, list[float]] = {name: [] for name in weights}
    rows, rewards, prompts = [], [], []
    baselines: list[float] = []
    base, least = 0, 2 if needs_two(algorithm) else 1
    for position, group in enumerate(groups):
        place_of = {id(t): place for place, t in enumerate(group.header.trajectories)}
        samples = by_sample(t for t in group.header.trajectories if t.reward is not None)
        if len(samples) < least:
            raise TrainingError(
                f"group {group.uid} cannot be trained: algorithm.advantage={algorithm.advantage} needs the rewards of "
                f"at least {least} sample(s) of a group, got {len(samples)}"
            )
        for sample in samples:
            own = [t.reward for t in sample if t.reward is not None]
            if bad := [reward for reward in own if not math.isfinite(reward)]:
                raise TrainingError(f"group {group.uid} cannot be trained: rewards must be finite, got {bad[0]}")
            # A prompt is identified by its offset in the concatenated bodies.
            rows += [
                (position, place_of[id(t)], len(rewards), base + t.prompt_at, t.prompt_tokens, t.fed, t.trained_tokens)
                for t in sample
            ]
            rewards.append(of_sample(own))
            prompts.append(position)
            if needs_baseline(algorithm):
                baselines.append(sample[0].metrics[BASELINE])
            for name, scores in parts.items():
                given = [t.metrics[key] for t in sample if (key := f"reward/{name}") in t.metrics]
                scores.append(of_sample(given) if given else math.nan)
        base += group.header.body_bytes
    positions, places, numbers, prompt_at, prompt_tokens, fed, trained = np.array(rows, np.int64).reshape(-1, 7).T
    tokens = np.bincount(numbers, trained, len(rewards)).astype(np.int64)
    step = StepRewards(
        np.array(rewards, dtype=np.float64),
        np.array(prompts, dtype=np.int64),
        tokens,
        {name: np.array(scores, dtype=np.float64) for name, scores in parts.items()},
        weights,
        baselines=np.array(baselines) if baselines else None,
    )
    # Those of tokens come later.
    later = of_tokens or not algorithm.reward_coef
    advantages = np.zeros(len(rewards)) if later else advantages_of(step, algorithm)
    members = Members(
        np.arange(len(rows)),
        positions,
        places,
        numbers,
        advantages[numbers],
        trained,
        tokens[numbers] if algorithm.sample_weight == "sample" else trained,
        Lengths(prompt_at, prompt_tokens, fed),
    )
    return members, step


def advantages_of(step: StepRewards, algorithm: AlgorithmConfig) -> NDArray[np.float64]:
    """The advantages of all samples of a step. Raises TrainingError for an estimator that returns something else."""
    advantages = np.asarray(estimator_of(algorithm)(step), dtype=np.float64)
    check_advantages(algorithm, advantages, len(step.rewards), "sample", bool(np.isfinite(advantages).all()))
    return advantages


def check_advantages(
    algorithm: AlgorithmConfig, advantages: NDArray[Any], count: int, what: str, finite: bool = True
) -> None:
    """Raises TrainingError unless an estimator has returned ``count`` numbers, which are ``finite``."""
    if advantages.shape != (count,) or not finite:
        raise TrainingError(
            f"algorithm.advantage={algorithm.advantage} must return {count} finite numbers, one for each {what}, but "
            f"returned {advantages!r:.200}"
        )


def divisor_of(part: Members, algorithm: AlgorithmConfig, longest: int) -> float:
    """What the sum over all trajectories of a minibatch is divided by; see `AlgorithmConfig.aggregation`."""
    if algorithm.aggregation == "token":
        return float(part.trained.sum())
    each = part.samples if algorithm.sample_weight == "sample" else part.numbers
    sequences = float(len(np.unique(each[part.trained > 0])))
    return sequences if algorithm.aggregation == "sequence" else sequences * longest


def split(members: Members, groups: int, parts: int) -> list[Members]:
    """Splits groups, in order, into ``parts`` non-empty minibatches of nearly equal numbers of groups."""
    parts = max(1, min(parts, groups))
    bounds = np.searchsorted(members.groups, [groups * part // parts for part in range(parts + 1)])
    return [members[np.arange(low, high)] for low, high in pairwise(bounds.tolist())]
