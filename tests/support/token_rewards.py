"""Rewards of tokens as an estimator gets them."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages import TokenRewards


def step_of(rows, longest, summed=lambda sums: sums, squared_norms=None):
    """``rows`` are (group, response)."""
    flat = [reward for _, response in rows for reward in response]
    rewards = np.array([reward or 0.0 for reward in flat], dtype=float)
    rewarded = np.array([reward is not None for reward in flat], dtype=bool)
    starts = np.cumsum([0, *(len(response) for _, response in rows)])
    groups = np.array([group for group, _ in rows], dtype=np.int64)
    return TokenRewards(rewards, np.zeros(len(flat)), starts, rewarded, groups, longest, summed, squared_norms)


def longest_of(groups):
    return np.array([max(map(len, group)) for group in groups])


def rows_of(groups):
    return [(number, response) for number, group in enumerate(groups) for response in group]


def with_values(rewards, values, starts):
    """Each response answers a prompt of its own, and each token has a reward and a critic's value."""
    groups, rewarded = np.arange(len(starts) - 1), np.ones(len(rewards), bool)
    return TokenRewards(rewards, values, starts, rewarded, groups, np.diff(starts), lambda sums: sums)
