"""Generalised advantage estimation from a critic's values (Schulman et al. 2016, arXiv 1506.02438, equation 16)."""

from __future__ import annotations

import numpy as np

from megasync.algorithms.advantages.rewards import Floats, TokenRewards


def gae(step: TokenRewards, *, gamma: float = 1.0, lam: float = 1.0) -> Floats:
    """A_t = sum over k of (gamma lam)^k d_(t+k), with d_t = r_t + gamma V_(t+1) - V_t and V = 0 after the last token.

    Only trained tokens count: the token after one is the sample's next trained token, whatever a tool or a user wrote
    between them, and whichever trajectory it is in.
    """
    lengths = np.diff(step.starts)
    ends = step.starts[1:]
    rewards, advantages = step.earned, np.zeros(len(step.rewards))
    # From the last tokens of all trajectories to their first ones: value and advantage of the token after.
    following = np.zeros((2, len(lengths)))
    if (forks := step.forks) is not None:
        following[0] = forks.following(step.of_step(step.values[step.starts[:-1]]))[forks.numbers]
    for back in range(1, int(lengths.max(initial=0)) + 1):
        active = np.flatnonzero(lengths >= back)
        tokens = ends[active] - back
        value, advantage = following[:, active]
        delta = rewards[tokens] + gamma * value - step.values[tokens]
        advantages[tokens] = delta + gamma * lam * advantage
        following[:, active] = step.values[tokens], advantages[tokens]
    if forks is None:
        return advantages
    # What the first token of the next trajectory adds to its own: sequentially, from the last trajectory of a sample.
    first = step.of_step(advantages[step.starts[:-1]])
    decay = (gamma * lam) ** forks.tokens
    for place in np.flatnonzero(~forks.last)[::-1].tolist():
        first[place] += decay[place] * first[place + 1]
    later = np.repeat(forks.following(first)[forks.numbers], lengths)
    left = np.repeat(ends, lengths) - np.arange(len(step.rewards))
    return advantages + (gamma * lam) ** left * later
