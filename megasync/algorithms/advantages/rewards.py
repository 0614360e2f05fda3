"""The rewards of one training step, as every advantage estimator gets them.

The unit is the sample: what one call of the workflow returned. It is one trajectory, or several where its conversation
forked, and then all of them are the same draw from the policy. So statistics are over samples, and a sample's advantage
is that of all of its trajectories: with each trajectory for itself, a sample that forked would be compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Added to the variance.
WHITEN_EPS = 1e-8
# Rewards of tokens are float32: what their sum lacks of the sample's reward may be an error of rounding.
ROUNDING = 1e-5


@dataclass(frozen=True)
class StepRewards:
    """All samples of a step that have a reward, as arrays [samples]."""

    # Finite numbers.
    rewards: Floats
    # Ascending: samples with the same number answer the same prompt.
    groups: Ints
    # Trained tokens.
    tokens: Ints
    # The scores of each of several reward functions by name, NaN where a function gave none, and their weights. Both
    # are empty without several functions.
    parts: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    # Sums over the trained tokens of the log-ratio of policy and reference, for estimators that say so; None before
    # they are known.
    log_ratios: Floats | None = None
    # Rewards of the greedy responses to the prompts, for estimators that say so.
    baselines: Floats | None = None

    def each_group(self) -> Iterator[slice]:
        """The samples of each prompt."""
        starts = np.flatnonzero(np.diff(self.groups, prepend=-1))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(self.groups)], strict=True):
            yield slice(start, end)

    def whitened(self, values: Floats) -> Floats:
        """Values of samples, shifted and scaled to mean 0 and variance 1 over all trained tokens of the step.

        The variance is the unbiased one, of tokens that carry their sample's value.
        """
        count = int(self.tokens.sum())
        if count < 2:
            return values - (values @ self.tokens) / max(1, count)
        centred = values - (values @ self.tokens) / count
        variance = (centred**2 @ self.tokens) / (count - 1)
        return centred / np.sqrt(variance + WHITEN_EPS)


@dataclass(frozen=True)
class Forks:
    """The trajectories of a step by sample: arrays [trajectories of the step], the same on every rank."""

    # Their samples, ascending.
    samples: Ints
    # Their prompts.
    groups: Ints
    # Their trained tokens.
    tokens: Ints
    # The places of this rank's trajectories among them.
    numbers: Ints

    @classmethod
    def none(cls, groups: Ints, tokens: Ints) -> Forks:
        """The forks of a step without any: this rank has all of its trajectories, and each is a sample of its own."""
        places = np.arange(len(groups))
        return cls(places, groups, tokens, places)

    @property
    def last(self) -> NDArray[np.bool_]:
        """Whether a trajectory is the last of its sample."""
        return np.diff(self.samples, append=-1) != 0

    def before(self, values: Floats | Ints) -> NDArray[Any]:
        """The sums of the values of the trajectories before each in its sample."""
        so_far = np.cumsum(values) - values
        return so_far - so_far[np.searchsorted(self.samples, self.samples)]

    def after(self, values: Floats) -> Floats:
        """The sums of the values of the trajectories after each in its sample."""
        total = np.bincount(self.samples, values)[self.samples]
        return np.where(self.last, 0.0, total - self.before(values) - values)

    def following(self, values: Floats) -> Floats:
        """The value of the next trajectory of the sample; 0 after the last."""
        return np.where(self.last, 0.0, np.append(values[1:], 0.0))


@dataclass(frozen=True)
class TokenRewards:
    """The trained tokens of this rank's trajectories of a step, one trajectory after another; arrays [tokens].

    The rewards of a trajectory sum up to what its sample earns from its first token on: with one trajectory the
    sample's reward, with several less what the tokens of earlier ones were given. What later ones earn (`carried`) is
    at the last token; `earned` is without it.
    """

    # Less `penalties`.
    rewards: Floats
    # A critic's values of the text before each token; 0 without one.
    values: Floats
    # Trajectory i has the tokens from `starts[i]` up to `starts[i + 1]`.
    starts: Ints
    # The tokens with a reward of their own.
    rewarded: NDArray[np.bool_]
    # The prompts that the trajectories answer, [trajectories].
    groups: Ints
    # The most trained tokens of a sample of each prompt, [prompts].
    longest: Ints
    # Returns the sums of its argument over all ranks. Each rank must call it the same number of times, with arrays of
    # the same shape.
    summed: Callable[[Floats], Floats]
    # Squared norms of the gradients of the tokens' log-probs by their logits, 1 - 2 p + sum(p^2), for estimators that
    # say so.
    squared_norms: Floats | None = None
    penalties: Floats | None = None
    # None if no sample of the step has more than one trajectory.
    forks: Forks | None = None
    # What later trajectories of the sample earn, [trajectories]; None without `forks`.
    carried: Floats | None = None

    @classmethod
    def of(
        cls,
        step: StepRewards,
        forks: Forks,
        prompts: int,
        summed: Callable[[Floats], Floats],
        *,
        starts: Ints,
        token_rewards: Floats,
        rewarded: NDArray[np.bool_],
        values: Floats,
        penalties: Floats | None = None,
        squared_norms: Floats | None = None,
    ) -> TokenRewards:
        """Builds the rewards of tokens from those given to single ones, which are parts of their samples' rewards.

        A collective.

        What they leave of a reward counts at the last token of its sample, which then is ``rewarded``. So it is if
        tokens have penalties: nothing may follow the last reward.
        """
        longest = np.zeros(prompts, dtype=np.int64)
        np.maximum.at(longest, step.groups, step.tokens)
        bounds = starts[:-1], starts[1:]
        cumulative = [np.concatenate([[0.0], np.cumsum(each)]) for each in (token_rewards, rewarded)]
        if penalties is not None:
            cumulative.append(np.concatenate([[0.0], np.cumsum(penalties)]))
        # By trajectory.
        sums = np.stack([each[bounds[1]] - each[bounds[0]] for each in cumulative])
        alone, numbers, last = bool(forks.last.all()), forks.numbers, forks.last[forks.numbers]
        of_step = np.zeros((len(cumulative), len(forks.samples)))
        of_step[:, numbers] = sums
        if not alone:
            of_step = summed(of_step)
        of_samples = np.stack([np.bincount(forks.samples, each, len(step.rewards)) for each in of_step])
        left = step.rewards - of_samples[0]
        open_end = (of_samples[1] == 0) | (np.abs(left) > ROUNDING * np.maximum(1.0, np.abs(step.rewards)))
        left = np.where(open_end, left, 0.0)
        rewards, rewarded = token_rewards.copy(), rewarded.copy()
        ends = bounds[1][last] - 1
        samples = forks.samples[numbers[last]]
        rewards[ends] += left[samples]
        rewarded[ends] |= open_end[samples] | (penalties is not None)
        carried = None
        if penalties is not None:
            rewards -= penalties
        if not alone:
            total = of_step[0] + np.where(forks.last, left[forks.samples], 0.0)
            carried = forks.after(total if penalties is None else total - of_step[2])[numbers]
            rewards[bounds[1] - 1] += carried
        return cls(
            rewards,
            values,
            starts,
            rewarded,
            forks.groups[numbers],
            longest,
            summed,
            squared_norms,
            penalties,
            None if alone else forks,
            carried,
        )

    @property
    def earned(self) -> Floats:
        """The rewards of the tokens themselves."""
        if self.carried is None:
            return self.rewards
        earned = self.rewards.copy()
        earned[self.starts[1:] - 1] -= self.carried
        return earned

    def by_group(self, values: Floats, groups: Ints) -> Floats:
        """The sums of values by their groups, [prompts]."""
        return np.bincount(groups, values, len(self.longest)).astype(np.float64)

    def of_step(self, local_values: Floats) -> Floats:
        """Values of this rank's trajectories, [own trajectories], as those of all trajectories of the step.

        A collective if a sample forked; else this rank's are enough, because samples are whole.
        """
        if self.forks is None:
            return local_values.astype(np.float64)
        values = np.zeros(len(self.forks.samples))
        values[self.forks.numbers] = local_values
        return self.summed(values)
