"""OPO: the baseline of least variance, if the gradient of a sample grows with its length."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, StepRewards


def opo(step: StepRewards) -> Floats:
    """The reward minus the mean of the group's rewards, weighted by the samples' numbers of trained tokens.

    Hao et al. 2025, arXiv 2505.23585.
    """
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards, tokens = step.rewards[group], step.tokens[group]
        baseline = (rewards @ tokens) / max(1, int(tokens.sum()))
        advantages[group] = 0.0 if rewards.max() == rewards.min() else rewards - baseline
    return advantages
