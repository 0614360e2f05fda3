"""Advantage estimators: pure functions of the rewards of a step, and these rewards as every estimator gets them.

The unit is the sample: what one call of the workflow returned. It is one trajectory, or several where its conversation
forked, and then all of them are the same draw from the policy. So statistics are over samples, and a sample's advantage
is that of all of its trajectories: with each trajectory for itself, a sample that forked would be compared with itself.

Estimators of samples take `StepRewards` and return a number for each sample; those of tokens take `TokenRewards`. Their
options are in `config.builtin.ADVANTAGES`, under the names of the functions; docs/adding_an_algorithm.md shows how to
add one.

Invariant of `grpo`: the advantages of a group sum to zero, and if all rewards are equal they are exactly zero. The
early return of `of_group` guarantees the latter; dividing a rounding error by a tiny deviation would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
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
        starts = np.flatnonzero(np.diff(self.groups, prepend=-1)).tolist()
        for start, end in pairwise([*starts, len(self.groups)]):
            yield slice(start, end)

    def whitened(self, values: Floats) -> Floats:
        """Values of samples, shifted and scaled to mean 0 and variance 1 over all trained tokens of the step.

        The variance is the unbiased one, of tokens that carry their sample's value.
        """
        count = int(self.tokens.sum())
        if len(set(values.tolist())) == 1:
            # Dividing a rounding error of the mean by the deviation would not be zero.
            return np.zeros(len(values))
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


# Estimators of samples

# Added to the standard deviation. Rewards are of order 1, so this matters only if they are nearly equal.
STD_EPS = 1e-6


def grpo(step: StepRewards, *, normalize_std: bool) -> Floats:
    """``(r - mean) / std`` within each group, with the sample standard deviation (n - 1), as in common implementations.

    Shao et al. 2024, arXiv 2402.03300, section 4.1.2. Without ``normalize_std`` it is Dr. GRPO's ``r - mean`` (Liu et
    al. 2025, arXiv 2503.20783, section 3.2), which does not favour groups that are nearly solved or unsolved.
    """
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        advantages[group] = of_group(step.rewards[group].tolist(), normalize_std)
    return advantages


def of_group(rewards: list[float], normalize_std: bool) -> list[float]:
    """The advantages of one group."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPS) for value in centred]


def grpo_passk(step: StepRewards, *, normalize_std: bool) -> Floats:
    """The best reward of a group minus its second best, for the best sample; 0 for all others.

    Tang et al. 2025, arXiv 2503.19595: what the best of the group loses without the sample, an unbiased gradient of the
    expected best of as many samples. Divided by the group's standard deviation (n - 1) with ``normalize_std``, as in
    verl's function of this name.
    """
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        if len(rewards) < 2:
            continue
        second, best = np.sort(rewards)[-2:]
        scale = np.std(rewards, ddof=1) + STD_EPS if normalize_std else 1.0
        advantages[group.start + int(np.argmax(rewards))] = (best - second) / scale
    return advantages


def gdpo(step: StepRewards, *, normalize_std: bool) -> Floats:
    """The weighted sum of the GRPO advantages of each reward function, shifted and scaled over the step's tokens.

    arXiv 2601.05242; over tokens as verl does, where the paper takes the samples of the step. A reward of a larger
    scale then does not hide the others. A sample that a function gave no score gets nothing from it, and a group where
    fewer than two have one neither. With one reward function it is GRPO, shifted and scaled.
    """
    parts = step.parts or {"": step.rewards}
    total = np.zeros(len(step.rewards))
    for name, rewards in parts.items():
        weight = step.weights.get(name, 1.0)
        for group in step.each_group():
            scored = np.flatnonzero(np.isfinite(rewards[group])) + group.start
            if len(scored) > 1:
                total[scored] += weight * np.array(of_group(rewards[scored].tolist(), normalize_std))
    return step.whitened(total)


def rloo(step: StepRewards) -> Floats:
    """The reward minus the mean reward of the other samples of the group.

    Ahmadian et al. 2024, arXiv 2402.14740.
    """
    return _less(step, lambda rewards, _: (rewards.sum() - rewards) / (len(rewards) - 1))


def _less(step: StepRewards, baseline: Callable[[Floats, Ints], Floats | float]) -> Floats:
    """Rewards less the baseline of their group, given its rewards and tokens; 0 in groups of equal rewards."""
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        if rewards.max() != rewards.min():
            advantages[group] = rewards - baseline(rewards, step.tokens[group])
    return advantages


def opo(step: StepRewards) -> Floats:
    """The reward minus the mean of the group's rewards, weighted by the samples' numbers of trained tokens.

    The baseline of least variance, if the gradient of a sample grows with its length. Hao et al. 2025, arXiv
    2505.23585.
    """
    return _less(step, lambda rewards, tokens: (rewards @ tokens) / max(1, int(tokens.sum())))


def gpg(step: StepRewards) -> Floats:
    """``(n / n_spread) (r - mean)`` in each group, of n samples of the step, n_spread of them in groups with spread.

    Chu et al. 2025, arXiv 2504.02546, with its normalisation F = 1: samples of groups with equal rewards have no
    gradient, and the mean over the step is corrected for them. verl's function of this name counts samples with a
    reward other than 0 instead, so that its scale depends on where the zero of the rewards is.
    """
    advantages, spread = np.zeros(len(step.rewards)), 0
    for group in step.each_group():
        rewards = step.rewards[group]
        if rewards.max() != rewards.min():
            advantages[group] = rewards - rewards.mean()
            spread += len(rewards)
    return advantages * (len(advantages) / max(1, spread))


def reinforce_plus_plus(step: StepRewards) -> Floats:
    """Rewards, shifted and scaled to mean 0 and variance 1 over the tokens of the step. Groups may be of one.

    Hu et al. 2025, arXiv 2501.03262. The reward is that of the whole sample, without a discount, so each of its tokens
    has the same return.
    """
    return step.whitened(step.rewards)


def reinforce_plus_plus_baseline(step: StepRewards) -> Floats:
    """`reinforce_plus_plus` of rewards from which the mean of their group is subtracted."""
    return step.whitened(_less(step, lambda rewards, _: float(rewards.mean())))


def remax(step: StepRewards) -> Floats:
    """``r - b``, where the reward ``b`` is that of the response that the same weights decode greedily.

    Li et al. 2023, arXiv 2310.10505.
    """
    assert step.baselines is not None
    return step.rewards - step.baselines


def dpo(step: StepRewards, *, beta: float = 0.1) -> Floats:
    """The samples with the highest and the lowest reward of each group are a pair; 0 for all others.

    Online preference optimisation (Guo et al. 2024, arXiv 2402.04792). The loss of a pair (Rafailov et al. 2023, arXiv
    2305.18290, equation 7) is -log sigmoid(beta (x_w - x_l)), with x the log-ratio of policy and reference, summed over
    the tokens of the better and of the worse sample. Its gradient is
    -beta sigmoid(beta (x_l - x_w)) (grad log pi_w - grad log pi_l): that of a policy gradient with these advantages.

    Groups of equal rewards have no pair. Before `StepRewards.log_ratios` are known, they count as 0.
    """
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        better, worse = group.start + int(rewards.argmax()), group.start + int(rewards.argmin())
        if rewards.max() == rewards.min():
            continue
        margin = 0.0 if step.log_ratios is None else beta * (step.log_ratios[better] - step.log_ratios[worse])
        # The logistic function of -margin, without an overflow.
        advantages[better] = beta * np.exp(-np.logaddexp(0.0, margin))
        advantages[worse] = -advantages[better]
    return advantages


# Estimators of tokens


def gae(step: TokenRewards, *, gamma: float = 1.0, lam: float = 1.0) -> Floats:
    """A_t = sum over k of (gamma lam)^k d_(t+k), with d_t = r_t + gamma V_(t+1) - V_t and V = 0 after the last token.

    Generalised advantage estimation from a critic's values (Schulman et al. 2016, arXiv 1506.02438, equation 16).
    Only trained tokens count: the token after one is the sample's next trained token, whatever a tool or a user wrote
    between them, and whichever trajectory it is in.
    """
    lengths = np.diff(step.starts)
    ends = step.starts[1:]
    rewards, advantages = step.earned, np.zeros(len(step.rewards))
    # From the last tokens of all trajectories to their first ones: value and advantage of the token after.
    following = np.zeros((2, len(lengths)))
    if (forks := step.forks) is not None:
        following[0] = forks.following(step.of_step(step.values[step.starts[:-1]]))[forks.numbers]
    for back in range(1, int(lengths.max(initial=0)) + 1):
        active = np.flatnonzero(lengths >= back)
        tokens = ends[active] - back
        value, advantage = following[:, active]
        delta = rewards[tokens] + gamma * value - step.values[tokens]
        advantages[tokens] = delta + gamma * lam * advantage
        following[:, active] = step.values[tokens], advantages[tokens]
    if forks is None:
        return advantages
    # What the first token of the next trajectory adds to its own: sequentially, from the last trajectory of a sample.
    first = step.of_step(advantages[step.starts[:-1]])
    decay = (gamma * lam) ** forks.tokens
    for place in np.flatnonzero(~forks.last)[::-1].tolist():
        first[place] += decay[place] * first[place + 1]
    later = np.repeat(forks.following(first)[forks.numbers], lengths)
    left = np.repeat(ends, lengths) - np.arange(len(step.rewards))
    return advantages + (gamma * lam) ** left * later


def grpo_process(step: TokenRewards, *, normalize_std: bool) -> Floats:
    """The sum of what a token's step and the later ones of its sample earn beyond the mean of all steps of the group.

    GRPO with rewards of single steps: process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3). A step
    ends where a token has a reward: at the end of a turn, a line of a proof, a tool call. Without such rewards a sample
    is one step, and this is `grpo`.

    ``(r - mean) / std`` over the steps of all samples of a prompt, with the sample standard deviation, summed from the
    end of the sample to the token's step. Without ``normalize_std`` it is not divided. The reward ``r`` of a step is
    less the penalties of all of its tokens.
    """
    lengths = np.diff(step.starts)
    forks = step.forks or Forks.none(step.groups, lengths)
    trajectory = np.repeat(np.arange(len(lengths)), lengths)
    # Steps are numbered over all trajectories, one after another. One that a trajectory leaves open goes on in the next
    # of its sample, so its tokens have the number of the first step there.
    passed = np.concatenate([[0], np.cumsum(step.rewarded)])
    counts = step.of_step(np.diff(passed[step.starts])).astype(np.int64)
    ends = np.cumsum(counts)
    end_of_sample = ends[np.searchsorted(forks.samples, forks.samples, "right") - 1]
    first = (ends - counts)[forks.numbers]
    number = (first - passed[step.starts[:-1]])[trajectory] + passed[:-1]
    # After the last step of its sample a token has nothing to come.
    within = number < end_of_sample[forks.numbers][trajectory]
    rewards = np.bincount(number[within], step.earned[within], int(counts.sum())).astype(np.float64)
    if step.forks is not None:
        rewards = step.summed(rewards)
    # Each rank counts the steps that end on it.
    local_rewards, group = rewards[number[step.rewarded]], step.groups[trajectory[step.rewarded]]
    count, total = step.summed(
        np.stack([step.by_group(np.ones_like(local_rewards), group), step.by_group(local_rewards, group)])
    )
    mean = total / np.maximum(count, 1)
    centred = rewards - mean[np.repeat(forks.groups, counts)]
    if normalize_std:
        squares = step.summed(step.by_group((local_rewards - mean[group]) ** 2, group))
        deviation = np.sqrt(squares / np.maximum(count - 1, 1)) + STD_EPS
        centred /= deviation[np.repeat(forks.groups, counts)]
    so_far = np.concatenate([[0.0], np.cumsum(centred)])
    return np.where(within, so_far[end_of_sample[forks.numbers]][trajectory] - so_far[number], 0.0)


def optimal_token_baseline(step: TokenRewards) -> Floats:
    """``G_t - B_t``, with the reward to come ``G_t`` and ``B_t = sum(W_t G_t) / sum(W_t)`` over the group.

    The variance of a policy gradient is least with the baseline E[|g|^2 R] / E[|g|^2], where g is the gradient of the
    log-prob of a response (Greensmith et al. 2004, JMLR 5, section 4). This is estimated at each position from the
    samples of the same prompt, as verl's function of this name does: the gradients of a sample's tokens by their logits
    stand for g, and their squared norms 1 - 2 p + sum(p^2) are summed up to the position.

    ``W_t`` is the sum of the squared norms of a sample's trained tokens up to its t-th. Where only one sample of
    the group has a t-th token, B_t is 0.
    """
    assert step.squared_norms is not None
    lengths = np.diff(step.starts)
    trajectory = np.repeat(np.arange(len(step.groups)), lengths)
    position = np.arange(len(step.rewards)) - step.starts[trajectory]
    so_far = np.cumsum(step.rewards)
    to_come = so_far[step.starts[1:] - 1][trajectory] - so_far + step.rewards
    norms = np.cumsum(step.squared_norms)
    first = np.concatenate([[0.0], norms])[step.starts]
    weight = norms - first[:-1][trajectory]
    if (forks := step.forks) is not None:
        # A sample's tokens are counted over all of its trajectories.
        position = position + forks.before(forks.tokens)[forks.numbers][trajectory]
        weight = weight + forks.before(step.of_step(np.diff(first)))[forks.numbers][trajectory]
    # Groups one after another, each with as many places as its longest sample has tokens.
    offsets = np.cumsum(step.longest) - step.longest
    place, places = offsets[step.groups[trajectory]] + position, int(step.longest.sum())
    local_sums = [np.bincount(place, values, places) for values in (weight * to_come, weight, np.ones(len(place)))]
    total, weights, count = step.summed(np.stack(local_sums).astype(np.float64))
    baseline = np.where(count > 1, total / (weights + 1e-8), 0.0)
    return to_come - baseline[place]
