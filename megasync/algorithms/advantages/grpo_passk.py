"""The gradient of the best of k: only the best sample of a group gets an advantage."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.grpo import STD_EPS
from megasync.algorithms.advantages.rewards import Floats, StepRewards


def grpo_passk(step: StepRewards, *, normalize_std: bool) -> Floats:
    """The best reward of a group minus its second best, for the best sample; 0 for all others.

    Tang et al. 2025, arXiv 2503.19595: what the best of the group loses without the sample, an unbiased gradient of the
    expected best of as many samples. Divided by the group's standard deviation (n - 1) with ``normalize_std``, as in
    verl's function of this name.
    """
    advantages = np.zeros(len(step.rewards))
    for group in step.each_group():
        rewards = step.rewards[group]
        second, best = np.sort(rewards)[-2:]
        scale = np.std(rewards, ddof=1) + STD_EPS if normalize_std else 1.0
        advantages[group.start + int(np.argmax(rewards))] = (best - second) / scale
    return advantages
