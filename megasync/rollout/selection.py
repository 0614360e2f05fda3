"""Selects which of a prompt's scored responses become a group, or drops the group, and sums up how it ended. Pure.

A sample is what one call of the workflow returned: one trajectory, or several where its conversation forked. Rules
count and compare samples, by their rewards (`trajectory.of_sample`).

Invariant: the result is either trajectories that can all be trained (a reward, at least one token in the loss, enough
samples to compare) or a `Dropped` with a reason. The rollouter hands exactly one of the two to the buffer, so a
rejected group frees its slot.

The steps, in order: remove responses without a reward or a trained token; remove samples that reached the length limit
(`overlong: mask`); of more samples than needed, keep those with the largest spread of rewards (`keep: spread`); drop a
group with nothing to compare; penalise over-long samples (`overlong: punish`). The penalty is last, so that every
choice is made by what the task says of a sample, and none by its length.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megasync.config.schema import GroupConfig
from megasync.trajectory import TOKEN_REWARDS, Trajectory, by_sample, of_sample, sample_rewards

# Reasons that are no failures: all rewards are equal, so there is nothing to learn. Solved is a reward of at least 1,
# failed one of at most 0, and anything between is uniform.
ALL_SOLVED, ALL_FAILED, UNIFORM = "all_solved", "all_failed", "uniform"
# Too few responses are left without those that reached the length limit.
OVERLONG = "overlong"
HARMLESS = frozenset({ALL_SOLVED, ALL_FAILED, UNIFORM, OVERLONG})
# A prompt that the curriculum leaves out.
LEFT_OUT = "left_out"
# A prompt that kills servers.
KILLS_SERVERS = "kills_servers"
# A prompt whose user code kills its rollout worker.
KILLS_WORKERS = "kills_workers"
# A prompt whose environment or tool server has failed for everybody for too long.
SERVICE_DOWN = "service_down"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that will not be trained: the reason it is counted under, and the text of the error behind it, if any."""

    reason: str
    problem: str = ""


# Metric name to (sum, number of values) over the samples of a group, or its responses.
Summary = Mapping[str, tuple[float, int]]


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """How a group ended. Neither `taken` nor `dropped` if the buffer declined it: it was closed, or returns the group.

    `scored` summarizes its trajectories, if they were scored; `lengths` are the tokens of each. `score` is the mean
    reward of its samples, if it was committed.
    """

    uid: str
    taken: bool = False
    dropped: Dropped | None = None
    scored: Summary | None = None
    lengths: tuple[int, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """Applies the rules of `GroupConfig`. A group needs `samples` samples; `max_new_tokens` is the length limit.

    With `relative`, the samples of a group are compared with each other, so a group needs at least two. `compared` are
    the names of reward functions whose scores are compared each by itself.
    """

    config: GroupConfig
    samples: int
    max_new_tokens: int
    relative: bool = True
    compared: tuple[str, ...] = ()

    @property
    def samples_started(self) -> int:
        return self.samples + self.config.extra_samples

    @property
    def samples_awaited(self) -> int:
        """Number of started samples that must finish; the rest are aborted."""
        return self.samples if self.config.keep == "first" else self.samples_started

    @property
    def least(self) -> int:
        """Samples without which a group is not trained."""
        return 2 if self.relative else 1

    def select(self, scored: Sequence[Sequence[Trajectory]], counts: Counter[str]) -> list[Trajectory] | Dropped:
        """Select the trajectories of the group, or return why the group is dropped.

        `scored` holds the trajectories of each sample. `counts` is incremented for removed and penalised ones.
        """
        trainable = ([t for t in sample if t.reward is not None and t.oldest_version is not None] for sample in scored)
        usable = [sample for sample in trainable if sample]
        if self.config.overlong == "mask":
            # What is left of a sample of which a part was cut off is not what its reward is for.
            complete = [sample for sample in usable if all(t.finish_reason != "length" for t in sample)]
            counts["responses_overlong"] += _count(usable) - _count(complete)
            if len(complete) < self.least <= len(usable):
                return Dropped(OVERLONG)
            usable = complete
        if self.config.keep == "spread" and len(usable) > self.samples:
            chosen = widest_spread([_reward(sample) for sample in usable], self.samples)
            counts["samples_unused"] += len(usable) - len(chosen)
            usable = [usable[index] for index in chosen]
        if not usable:
            return Dropped("unscored", "no response has both a reward and a token to train on")
        if len(usable) < self.least:
            return Dropped("lone_survivor", "only one sample of the group was scored")
        # A single sample is not equal to any other: an estimator that compares none learns from it.
        if self.config.drop_uniform and len(usable) > 1 and len({self._outcome(sample) for sample in usable}) == 1:
            reward = _reward(usable[0])
            return Dropped(ALL_SOLVED if reward >= 1 else ALL_FAILED if reward <= 0 else UNIFORM)
        if self.config.overlong == "punish":
            usable = [self._penalised(sample, counts) for sample in usable]
        return [trajectory for sample in usable for trajectory in sample]

    def _outcome(self, sample: Sequence[Trajectory]) -> tuple[float, ...]:
        """What the estimator compares of a sample: rewards of its tokens if it has any, scores, or the reward."""
        tokens = [t.arrays[TOKEN_REWARDS] for t in sample if TOKEN_REWARDS in t.arrays]
        token_rewards = [float(value) for array in tokens for value in array.tolist() if not math.isnan(value)]
        names = [f"reward/{name}" for name in self.compared]
        scores = [[t.metrics[name] for t in sample if name in t.metrics] for name in names]
        # A missing score differs from every other.
        return (_reward(sample), *token_rewards, *(of_sample(values) if values else math.inf for values in scores))

    def _penalised(self, sample: Sequence[Trajectory], counts: Counter[str]) -> Sequence[Trajectory]:
        """The sample with the penalty for all tokens that the model wrote in it, however they are split."""
        penalty = self.config.overlong_penalty * overlong_share(
            sum(t.trained().total() for t in sample), self.max_new_tokens, self.config.overlong_tokens
        )
        if not penalty:
            return sample
        counts["responses_overlong"] += len(sample)
        return [replace(t, reward=t.reward - penalty) for t in sample if t.reward is not None]


def summarize(trajectories: Sequence[Trajectory]) -> Summary:
    """The sums of a scored group's metrics. A group that is dropped counts too, or the mean reward would be biased.

    Rewards and metrics are those of samples, so that a conversation that forked counts once; lengths are of responses.
    """
    values: dict[str, list[float]] = {}
    for sample in by_sample(trajectories):
        of_this_sample: dict[str, list[float]] = {}
        for trajectory in sample:
            for name, value in trajectory.metrics.items():
                of_this_sample.setdefault(name, []).append(value)
        for name, each in of_this_sample.items():
            values.setdefault(name, []).append(of_sample(each))
    # Last, so that a workflow's metric of the same name does not mix with the rollout's own.
    values |= {
        "reward_mean": sample_rewards(trajectories),
        "response_length": [float(len(t.response_ids)) for t in trajectories],
        "truncated_share": [float(t.finish_reason == "length") for t in trajectories],
    }
    return {name: (sum(each), len(each)) for name, each in values.items() if each}


def _reward(sample: Sequence[Trajectory]) -> float:
    return of_sample([t.reward for t in sample if t.reward is not None])


def _count(samples: Sequence[Sequence[Trajectory]]) -> int:
    return sum(map(len, samples))


def overlong_share(length: int, longest: int, margin: int) -> float:
    """Return 0.0 up to a length of `longest - margin` tokens, then a linear ramp to 1.0 at `longest`.

    This is the soft over-long penalty of DAPO (Yu et al. 2025, equation 13), without its sign.
    """
    return min(1.0, max(0, length - (longest - margin)) / margin)


def widest_spread(rewards: Sequence[float], count: int) -> list[int]:
    """Return the sorted indices of the `count` rewards with the largest variance among all choices of that size.

    The best choice always consists of the highest and the lowest rewards (max-variance down-sampling, Xu et al. 2025,
    "Not All Rollouts are Useful"), so only `count + 1` choices are compared. Ties are broken by the order of `rewards`.
    """
    order = sorted(range(len(rewards)), key=lambda index: rewards[index])
    choices = [order[:low] + order[len(order) - (count - low) :] for low in range(count, -1, -1)]
    return sorted(max(choices, key=lambda choice: statistics.pvariance([rewards[index] for index in choice])))
