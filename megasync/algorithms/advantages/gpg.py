"""GPG: group means as baselines, scaled up by the share of groups that have a gradient."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, StepRewards


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
