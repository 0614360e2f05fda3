"""The two tables of a training step: a row for each trajectory, on all ranks, and one for each target of a rank.

Every rank makes the same `TrajectoryTable` from the headers of all groups, without communication and without reading a
token. Rewards are those of samples, and so are advantages: each trajectory gets that of its sample
(`algorithms.advantages`).

A `TokenTable` has the targets of one microbatch. Only ranks of the last pipeline stage have such tables, for their own
microbatches; no column of them is ever gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from megasync.algorithms.advantages import StepRewards
from megasync.algorithms.choose import Column, Columns, estimator_of, group_inputs
from megasync.buffer.payload import LeasedGroup
from megasync.config.schema import AlgorithmConfig
from megasync.errors import TrainingError
from megasync.trainer.packing import Ints, Lengths
from megasync.trajectory import BASELINE, TEACHER, TOKEN_REWARDS, Trajectory, by_sample, of_sample

if TYPE_CHECKING:
    # Imports Megatron, which these tables do without.
    from megasync.trainer.flops import Work
    from megasync.trainer.learner import LocalBatch

# Loads some trajectories of a group, by their positions in its header.
Loader = Callable[[LeasedGroup, Sequence[int]], Sequence[Trajectory]]


@dataclass(frozen=True)
class TrajectoryTable:
    """The trajectories of a step that have a reward, in order, as arrays [trajectories]; from headers alone."""

    # The positions of trajectories in the step.
    numbers: Ints
    # The position of a trajectory's group, and its own within the group's header.
    groups: Ints
    places: Ints
    # The positions of their samples in the step, ascending.
    samples: Ints
    # Of their samples; 0 if advantages of tokens are estimated.
    advantages: NDArray[np.float64]
    # Trained tokens.
    trained: Ints
    # Trained tokens of what the loss takes for one sequence: the trajectory, or its sample (`algorithm.sample_weight`).
    sequences: Ints
    lengths: Lengths

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, selection: Ints) -> TrajectoryTable:
        return TrajectoryTable(*(getattr(self, item.name)[selection] for item in fields(self)))

    def split(self, groups: int, parts: int) -> list[TrajectoryTable]:
        """Splits groups, in order, into ``parts`` non-empty minibatches of nearly equal numbers of groups."""
        parts = max(1, min(parts, groups))
        bounds = np.searchsorted(self.groups, [groups * part // parts for part in range(parts + 1)])
        return [self[np.arange(low, high)] for low, high in pairwise(bounds.tolist())]

    def load(self, groups: Sequence[LeasedGroup], rows: Sequence[int], load: Loader) -> dict[int, Trajectory]:
        """Some trajectories by their rows, which are ascending; one call of ``load`` per group."""
        loaded: dict[int, Trajectory] = {}
        for group, of_group in groupby(rows, key=lambda row: int(self.groups[row])):
            of_group = list(of_group)
            loaded |= zip(of_group, load(groups[group], self.places[of_group].tolist()), strict=True)
        return loaded


def trajectory_table(
    groups: Sequence[LeasedGroup], algorithm: AlgorithmConfig, of_tokens: bool
) -> tuple[TrajectoryTable, StepRewards]:
    """The trajectories with a reward, sample by sample, and the rewards of the samples.

    ``of_tokens``: advantages of tokens are estimated later. Raises TrainingError for groups that the estimator cannot
    use.
    """
    inputs = group_inputs(algorithm)
    weights = {name: weight for group in groups for name, weight in group.header.weights.items()}
    parts: dict[str, list[float]] = {name: [] for name in weights}
    rows, rewards, prompts = [], [], []
    baselines: list[float] = []
    base, least = 0, 2 if "relative" in inputs else 1
    for position, group in enumerate(groups):
        place_of = {id(t): place for place, t in enumerate(group.header.trajectories)}
        samples = by_sample(t for t in group.header.trajectories if t.reward is not None)
        if len(samples) < least:
            raise TrainingError(
                f"group {group.uid} cannot be trained: algorithm.advantage={algorithm.advantage} needs the rewards of "
                f"at least {least} sample(s) of a group, got {len(samples)}"
            )
        for sample in samples:
            earned = [t.reward for t in sample if t.reward is not None]
            if bad := [reward for reward in earned if not math.isfinite(reward)]:
                raise TrainingError(f"group {group.uid} cannot be trained: rewards must be finite, got {bad[0]}")
            # A prompt is identified by its offset in the concatenated bodies.
            for t in sample:
                lengths = t.prompt_tokens, t.response_inputs, t.trained_tokens
                rows.append((position, place_of[id(t)], len(rewards), base + t.prompt_at, *lengths))
            rewards.append(of_sample(earned))
            prompts.append(position)
            if "baseline" in inputs:
                baselines.append(sample[0].metrics[BASELINE])
            for name, scores in parts.items():
                scored = [t.metrics[key] for t in sample if (key := f"reward/{name}") in t.metrics]
                scores.append(of_sample(scored) if scored else math.nan)
        base += group.header.body_bytes
    positions, places, numbers, *lengths, trained = np.array(rows, np.int64).reshape(-1, 7).T
    tokens = np.bincount(numbers, trained, len(rewards)).astype(np.int64)
    step = StepRewards(
        np.array(rewards, dtype=np.float64),
        np.array(prompts, dtype=np.int64),
        tokens,
        {name: np.array(scores, dtype=np.float64) for name, scores in parts.items()},
        weights,
        baselines=np.array(baselines) if baselines else None,
    )
    later = of_tokens or not algorithm.reward_coef
    advantages = np.zeros(len(rewards)) if later else sample_advantages(step, algorithm)
    table = TrajectoryTable(
        np.arange(len(rows)),
        positions,
        places,
        numbers,
        advantages[numbers],
        trained,
        tokens[numbers] if algorithm.sample_weight == "sample" else trained,
        Lengths(*lengths),
    )
    return table, step


def sample_advantages(step: StepRewards, algorithm: AlgorithmConfig) -> NDArray[np.float64]:
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


def divisor_of(part: TrajectoryTable, algorithm: AlgorithmConfig, longest: int) -> float:
    """The divisor of the sum over all trajectories of a minibatch; see `AlgorithmConfig.aggregation`."""
    if algorithm.aggregation == "token":
        return float(part.trained.sum())
    each = part.samples if algorithm.sample_weight == "sample" else part.numbers
    sequences = float(len(np.unique(each[part.trained > 0])))
    return sequences if algorithm.aggregation == "sequence" else sequences * longest


class TokenTable:
    """The targets of one microbatch: columns [targets] by name, on the rank's device.

    Targets are grouped by sequence: ``rows`` [sequences] are those of a minibatch's trajectories, ``counts``
    [sequences] their numbers of targets. A masked copy (``counted`` false) must reach neither the loss nor a sum.
    """

    def __init__(
        self, rows: Sequence[int], counted: bool, samples: Sequence[dict[Column, NDArray[Any]]], device: torch.device
    ) -> None:
        """``samples`` are the first columns, which are read of each sequence."""
        self.rows = np.array(rows)
        self.counted = counted
        self.counts = np.array([len(sample["behaviour"]) for sample in samples])
        self.columns: Columns = {}
        for name in samples[0]:
            values = np.concatenate([sample[name] for sample in samples])
            self.columns[name] = torch.from_numpy(values).to(device)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def repeated(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of a minibatch's trajectories, as those of their targets here."""
        return np.repeat(values[self.rows], self.counts)


def joined(values: Iterable[NDArray[Any]], dtype: type[np.generic] = np.float64) -> NDArray[Any]:
    """Values of several tables one after another, also of none."""
    return np.concatenate([np.zeros(0, dtype), *values]).astype(dtype)


def distribute(tables: Iterable[TokenTable], name: Column, values: torch.Tensor) -> None:
    """Makes a column of the values of all counted targets, which are in order; it is 0 in masked copies."""
    for table in tables:
        taken = len(table) if table.counted else 0
        table.columns[name] = values[:taken] if taken else values.new_zeros(len(table))
        values = values[taken:]


@dataclass
class Minibatch:
    """One optimizer step: the trajectories with a gradient, and what this rank computes of them."""

    trajectories: TrajectoryTable
    # Of the loss, for all trajectories; see `divisor_of`.
    divisor: float
    batch: LocalBatch
    # What a pass computes on all ranks.
    work: Work
    # One for each of this rank's microbatches on the last pipeline stage, and none on others.
    tables: Sequence[TokenTable]
    # Those of this rank's trajectories that are recorded, by row.
    recorded: dict[int, Trajectory]
    # The number of passes that have scored it.
    scorings: int = 0

    def add(self, name: Column, values: Sequence[torch.Tensor]) -> None:
        """Adds a column that the learner has computed of each microbatch, with none before the last stage."""
        for table, column in zip(self.tables, values, strict=True):
            table.columns[name] = column


@dataclass
class Step:
    """A training step on its way through the stages of `PolicyTrainer`."""

    number: int
    version: int
    groups: Sequence[LeasedGroup]
    load: Loader
    trajectories: TrajectoryTable
    # Of all samples.
    rewards: StepRewards
    # None where no trajectory of a minibatch has a gradient.
    parts: list[Minibatch | None]
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def minibatches(self) -> list[Minibatch]:
        """The minibatches with a gradient."""
        return [part for part in self.parts if part is not None]

    @property
    def tables(self) -> list[TokenTable]:
        """The tables of all minibatches."""
        return [table for minibatch in self.minibatches for table in minibatch.tables]

    def counted(self) -> Iterator[tuple[Minibatch, TokenTable]]:
        """All tables except masked copies."""
        for minibatch in self.minibatches:
            yield from ((minibatch, table) for table in minibatch.tables if table.counted)


def read_columns(
    trajectory: Trajectory, scored: NDArray[Any], version: int, columns: Container[Column]
) -> dict[Column, NDArray[Any]]:
    """The columns that a trajectory has, of its targets; ``scored`` are the offsets of the targets in the response."""
    read: dict[Column, NDArray[Any]] = {
        "behaviour": trajectory.logprobs[scored],
        "ages": version - trajectory.versions.expand()[scored],
    }
    if "teacher" in columns:
        missing = np.full(len(trajectory.response_ids), np.nan, dtype=np.float32)
        read["teacher"] = trajectory.arrays.get(TEACHER, missing)[scored]
    if "token_rewards" in columns:
        read["token_rewards"], read["rewarded"] = _token_rewards(trajectory, scored)
    return read


def _token_rewards(trajectory: Trajectory, scored: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The rewards given to single scored tokens, and whether each has one."""
    rewards, rewarded = np.zeros(len(scored)), np.zeros(len(scored), dtype=bool)
    of_tokens = trajectory.arrays.get(TOKEN_REWARDS, np.zeros(0, np.float32))
    at = np.flatnonzero(~np.isnan(of_tokens))
    # Those of tokens that were not sampled are for the last one before them that was.
    places = np.searchsorted(scored, at, side="right") - 1
    at, places = at[places >= 0], places[places >= 0]
    np.add.at(rewards, places, of_tokens[at].astype(np.float64))
    rewarded[places] = True
    return rewards, rewarded
