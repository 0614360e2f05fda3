"""GPG: group means as baselines, scaled up by the share of responses without a reward."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, StepRewards


def gpg(step: StepRewards) -> Floats:
    """``(n / n_nonzero) (r - mean)`` in each group, of n responses of the step, n_nonzero of them with a reward not 0.

    Chu et al. 2025, arXiv 2504.02546, with its normalisation F = 1.
    """
    scale = len(step.rewards) / max(1, int(np.count_nonzero(step.rewards)))
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        advantages[group] = 0.0 if rewards.max() == rewards.min() else scale * (rewards - rewards.mean())
    return advantages
