"""Advantages, policy losses and off-policy corrections: pure functions of tensors, one file each.

Nothing here knows of ranks, models or batches: callers reduce the sums that these functions return.
"""

from megasync.algorithms.advantages import group_advantages
from megasync.algorithms.policy_loss import policy_loss

__all__ = ["group_advantages", "policy_loss"]
