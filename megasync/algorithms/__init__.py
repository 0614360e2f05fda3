"""Advantages, policy losses and off-policy corrections: pure functions of tensors, one file each.

Nothing here knows about ranks, models or batches. Callers reduce the returned sums over ranks.
"""

from megasync.algorithms.advantages import group_advantages
from megasync.algorithms.policy_loss import policy_loss

__all__ = ["group_advantages", "policy_loss"]
