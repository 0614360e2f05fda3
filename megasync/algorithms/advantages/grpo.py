"""GRPO: a sample is compared with the other samples of its prompt.

Invariant: the advantages of a group sum to zero, and if all rewards are equal they are exactly zero. The early return
guarantees the latter; dividing a rounding error by a tiny deviation would not.
"""

from __future__ import annotations

import math

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, StepRewards

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
