"""A baseline for each position of a response, with the least variance of the gradient.

The variance of a policy gradient is least with the baseline E[|g|^2 R] / E[|g|^2], where g is the gradient of the
log-prob of a response (Greensmith et al. 2004, JMLR 5, section 4). This is estimated at each position from the
samples of the same prompt, as verl's `optimal_token_baseline` does: the gradients of a sample's tokens by their
logits stand for g, and their squared norms 1 - 2 p + sum(p^2) are summed up to the position.
"""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, TokenRewards

# Added to the sums that are divided by.
EPS = 1e-8


def optimal_token_baseline(step: TokenRewards) -> Floats:
    """``G_t - B_t``, with the reward to come ``G_t`` and ``B_t = sum(W_t G_t) / sum(W_t)`` over the group.

    ``W_t`` is the sum of the squared norms of a sample's trained tokens up to its t-th. Where only one sample of
    the group has a t-th token, B_t is 0.
    """
    assert step.squared_norms is not None
    lengths = np.diff(step.starts)
    trajectory = np.repeat(np.arange(len(step.groups)), lengths)
    position = np.arange(len(step.rewards)) - step.starts[trajectory]
    so_far = np.cumsum(step.rewards)
    to_come = so_far[step.starts[1:] - 1][trajectory] - so_far + step.rewards
    norms = np.cumsum(step.squared_norms)
    first = np.concatenate([[0.0], norms])[step.starts]
    weight = norms - first[:-1][trajectory]
    if (forks := step.forks) is not None:
        # A sample's tokens are counted over all of its trajectories.
        position = position + forks.before(forks.tokens)[forks.numbers][trajectory]
        weight = weight + forks.before(step.of_step(np.diff(first)))[forks.numbers][trajectory]
    # Groups one after another, each with as many places as its longest sample has tokens.
    offsets = np.cumsum(step.longest) - step.longest
    place, places = offsets[step.groups[trajectory]] + position, int(step.longest.sum())
    local_sums = [np.bincount(place, values, places) for values in (weight * to_come, weight, np.ones(len(place)))]
    total, weights, count = step.summed(np.stack(local_sums).astype(np.float64))
    baseline = np.where(count > 1, total / (weights + EPS), 0.0)
    return to_come - baseline[place]
