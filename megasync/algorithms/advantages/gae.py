"""Generalised advantage estimation from a critic's values (Schulman et al. 2016, arXiv 1506.02438, equation 16)."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, TokenRewards


def gae(step: TokenRewards, *, gamma: float = 1.0, lam: float = 1.0) -> Floats:
    """A_t = sum over k of (gamma lam)^k d_(t+k), with d_t = r_t + gamma V_(t+1) - V_t and V = 0 after the last token.

    Only trained tokens count: the token after one is the response's next trained token, whatever a tool or a user
    wrote between them.
    """
    lengths = np.diff(step.starts)
    ends = step.starts[1:]
    advantages = np.zeros(len(step.rewards))
    # From the last tokens of all responses to their first ones.
    following = np.zeros((2, len(lengths)))
    for back in range(1, int(lengths.max(initial=0)) + 1):
        own = np.flatnonzero(lengths >= back)
        tokens = ends[own] - back
        value, advantage = following[:, own]
        delta = step.rewards[tokens] + gamma * value - step.values[tokens]
        advantages[tokens] = delta + gamma * lam * advantage
        following[:, own] = step.values[tokens], advantages[tokens]
    return advantages
