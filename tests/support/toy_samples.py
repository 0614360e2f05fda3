"""A step's estimates for any samples.

The estimates go the way of a run: trajectories, encoded groups, headers, `trajectory_table`, the estimator. Tokens of a
sample are drawn one after another; a sample may be one trajectory, or forked into several that have the same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megasync.algorithms.advantages import Floats, Forks, TokenRewards
from megasync.algorithms.choose import estimator_of, takes_tokens
from megasync.buffer.payload import in_memory
from megasync.config.schema import AlgorithmConfig
from megasync.trainer.tables import trajectory_table
from megasync.trajectory import BASELINE, TOKEN_REWARDS, Group, Trajectory


@dataclass(frozen=True)
class Sample:
    """``parts`` are the numbers of tokens of its trajectories. What is given by token is an entry a token."""

    reward: float
    parts: tuple[int, ...]
    token_rewards: tuple[float | None, ...] = ()
    scores: tuple[tuple[str, float | None], ...] = ()
    penalties: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    log_ratio: float = 0.0
    baseline: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(self.parts)

    @property
    def whole(self) -> Sample:
        """The same without a fork."""
        return replace(self, parts=(self.tokens,))

    def trajectories(self, number: int) -> list[Trajectory]:
        found, start = [], 0
        for part in self.parts:
            given = self.token_rewards[start : start + part]
            arrays = {}
            if any(reward is not None for reward in given):
                arrays[TOKEN_REWARDS] = np.array([np.nan if r is None else r for r in given], np.float32)
            scores = {f"reward/{name}": score for name, score in self.scores if score is not None}
            metrics = {BASELINE: self.baseline, **scores}
            columns = [5] * part, [1] * part, [-0.5] * part, [0] * part
            rest = {"reward": self.reward, "metrics": metrics, "arrays": arrays, "sample": number}
            found.append(Trajectory([1, start + 2], *columns, **rest))
            start += part
        return found


def group_of(samples: Sequence[Sample], uid: str = "0:0", weights: dict[str, float] | None = None) -> Group:
    trajectories = [t for number, sample in enumerate(samples) for t in sample.trajectories(number)]
    return Group(uid, trajectories, weights=weights or {})


def advantages(
    groups: Sequence[Sequence[Sample]], config: AlgorithmConfig, weights: dict[str, float] | None = None, ranks: int = 1
) -> list[list[Floats]]:
    """The advantages of each sample's tokens, by group, as a step of the trainer estimates them.

    Of an estimator of tokens they are estimated on several ranks, among which trajectories are dealt in turns.
    """
    leased = [in_memory(group_of(samples, f"0:{at}", weights)) for at, samples in enumerate(groups)]
    of_tokens = takes_tokens(config, config.advantage == "gae")
    table, step = trajectory_table(leased, config, of_tokens)
    flat = [sample for samples in groups for sample in samples]
    penalties = np.array([sum(sample.penalties) for sample in flat])
    if of_tokens:
        found = _of_tokens(flat, table, step, config, len(groups), ranks)
    else:
        if penalties.any():
            step = replace(step, rewards=step.rewards - penalties)
        step = replace(step, log_ratios=np.array([sample.log_ratio for sample in flat]))
        each = estimator_of(config)(step)[table.samples]
        found = [np.full(tokens, value) for tokens, value in zip(table.trained.tolist(), each.tolist(), strict=True)]
    by_sample = [np.concatenate([found[at] for at in np.flatnonzero(table.samples == n)]) for n in range(len(flat))]
    rest = iter(by_sample)
    return [list(itertools.islice(rest, len(samples))) for samples in groups]


def _of_tokens(flat, table, step, config, prompts: int, ranks: int) -> list[Floats]:
    """What each trajectory's tokens get, from ranks that exchange sums."""
    starts = np.cumsum([0, *table.trained])
    columns = {
        "token_rewards": [r or 0.0 for s in flat for r in s.token_rewards or (None,) * s.tokens],
        "rewarded": [r is not None for s in flat for r in s.token_rewards or (None,) * s.tokens],
        "values": [v for s in flat for v in s.values or (0.0,) * s.tokens],
        "squared_norms": [v for s in flat for v in s.norms or (1.0,) * s.tokens],
    }
    if any(s.penalties for s in flat):
        columns["penalties"] = [v for s in flat for v in s.penalties or (0.0,) * s.tokens]
    own = [np.arange(rank, len(table), ranks) for rank in range(ranks)]

    def estimate(rank: int, summed: Callable[[Floats], Floats]) -> Floats:
        tokens = np.concatenate([np.arange(starts[at], starts[at + 1]) for at in own[rank]] or [np.zeros(0, int)])
        taken = {name: np.array(column)[tokens] for name, column in columns.items()}
        forks = Forks(table.samples, table.groups, table.trained, own[rank])
        begins = np.cumsum([0, *table.trained[own[rank]]])
        return estimator_of(config)(TokenRewards.of(step, forks, prompts, summed, starts=begins, **taken))

    shares = _together(estimate, ranks)
    found: list[Floats] = [np.zeros(0)] * len(table)
    for rank, share in enumerate(shares):
        for at, part in zip(own[rank].tolist(), np.split(share, np.cumsum(table.trained[own[rank]])), strict=False):
            found[at] = part
    return found


def _together(estimate: Callable[[int, Callable[[Floats], Floats]], Floats], ranks: int) -> list[Floats]:
    """Runs the ranks one after another until all have said what is to be summed, then again with the sums known."""
    sums: list[Floats] = []
    while True:
        asked: list[Floats] = []
        results = []
        for rank in range(ranks):
            known = iter(sums)

            def summed(values: Floats, known: Iterator[Floats] = known, asked: list[Floats] = asked) -> Floats:
                if (total := next(known, None)) is not None:
                    return total.copy()
                asked.append(values)
                raise _AsksError

            try:
                results.append(estimate(rank, summed))
            except _AsksError:
                continue
        if not asked:
            return results
        assert len(asked) == ranks and len({values.shape for values in asked}) == 1
        sums.append(np.sum(asked, axis=0))


class _AsksError(Exception):
    pass
