"""GRPO with rewards of single steps: process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3).

A step ends where a token has a reward: at the end of a turn, a line of a proof, a tool call. Without such rewards a
sample is one step, and this is `grpo`.
"""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.grpo import STD_EPS
from megasync.algorithms.advantages.rewards import Floats, Forks, TokenRewards


def grpo_process(step: TokenRewards, *, normalize_std: bool) -> Floats:
    """The sum of what a token's step and the later ones of its sample earn beyond the mean of all steps of the group.

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
