"""Group-relative advantages: each response is compared with the other responses to the same prompt.

Invariant: the advantages of a group sum to zero, and if all rewards are equal they are exactly zero. The early return
guarantees the latter; dividing a rounding error by a tiny deviation would not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Added to the standard deviation. Rewards are of order 1, so this matters only if they are nearly equal.
STD_EPS = 1e-6


def group_advantages(rewards: Sequence[float], normalize_std: bool) -> list[float]:
    """The advantages of one group's rewards, in the same order.

    With ``normalize_std`` this is GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2): ``(r - mean) / std``, with
    the sample standard deviation (n - 1), as in common implementations. Without, it is Dr. GRPO's ``r - mean`` (Liu et
    al. 2025, arXiv 2503.20783, section 3.2), which does not favour groups that are nearly solved or unsolved.

    Raises ValueError for fewer than two rewards, which leave nothing to compare with, and for a non-finite reward.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group-relative advantage needs at least two rewards, got {len(rewards)}")
    bad = [reward for reward in rewards if not math.isfinite(reward)]
    if bad:
        raise ValueError(f"rewards must be finite, got {bad[0]}")
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPS) for value in centred]
