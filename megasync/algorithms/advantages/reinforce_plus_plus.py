"""REINFORCE++: advantages normalised over the whole step instead of within groups.

Hu et al. 2025, arXiv 2501.03262. The reward is that of the whole sample, without a discount, so each of its tokens
has the same return.
"""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, StepRewards


def reinforce_plus_plus(step: StepRewards) -> Floats:
    """Rewards, shifted and scaled to mean 0 and variance 1 over the tokens of the step. Groups may be of one."""
    return step.whitened(step.rewards)


def reinforce_plus_plus_baseline(step: StepRewards) -> Floats:
    """The same of rewards from which the mean of their group is subtracted."""
    centred = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        centred[group] = 0.0 if rewards.max() == rewards.min() else rewards - rewards.mean()
    return step.whitened(centred)
