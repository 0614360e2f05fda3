"""RLOO: a sample is compared with the mean of the others."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, StepRewards


def rloo(step: StepRewards) -> Floats:
    """The reward minus the mean reward of the other samples of the group.

    Ahmadian et al. 2024, arXiv 2402.14740.
    """
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        advantages[group] = 0.0 if rewards.max() == rewards.min() else rewards - others
    return advantages
