"""Advantages, policy losses and off-policy corrections: pure functions of arrays and tensors.

Nothing here knows about ranks, models or batches. Callers reduce the returned sums over ranks.
"""

from megasync.algorithms.choose import estimator_of, loss_of

__all__ = ["estimator_of", "loss_of"]
