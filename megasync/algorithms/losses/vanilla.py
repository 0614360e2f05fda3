"""PPO's clipped surrogate, with dual clip."""

from __future__ import annotations

import torch

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def vanilla(tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual_clip: float | None) -> TokenLoss:
    """``-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)``, and at most ``-dual_clip A`` where A < 0.

    PPO: Schulman et al. 2017, arXiv 1707.06347, equation 7; bounds of their own on either side: DAPO, Yu et al. 2025,
    arXiv 2503.14476, section 3.1. For A < 0 this is unbounded above, because the ratio is. Dual clip (Ye et al. 2020,
    arXiv 1912.09729, equation 5) makes it a constant there, which has no gradient.
    """
    advantages = tokens.advantages
    free = tokens.ratio * advantages
    bounded = tokens.ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate, clipped = torch.minimum(free, bounded), bounded < free
    if dual_clip is None:
        return TokenLoss(-surrogate, clipped)
    floor = dual_clip * advantages
    dual_clipped = (advantages < 0) & (surrogate < floor)
    return TokenLoss(-torch.where(dual_clipped, floor, surrogate), clipped, dual_clipped)
