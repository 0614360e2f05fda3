"""GMPO: the geometric mean of a sequence's clipped ratios."""

from __future__ import annotations

import torch

from megasync.algorithms.kl import MAX_LOG_RATIO
from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def geo_mean(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-A exp(mean over the sequence of clipped log ratios)``, the same for each of its tokens.

    A token's log ratio is clipped to [-clip_low, clip_high] where that makes the objective smaller, and the mean is at
    most `MAX_LOG_RATIO`. Zhao et al. 2025, arXiv 2507.20673; the paper clips at 0.4 on both sides and takes
    the mean of sequences (``algorithm.aggregation=sequence``). All tokens of a sequence must have the same advantage:
    the gradient of a token's loss goes to all of them alike.
    """
    sign = tokens.advantages.sign()
    bounded = tokens.log_ratio.clamp(-clip_low, clip_high)
    least = sign * torch.minimum(sign * tokens.log_ratio, sign * bounded)
    ratio = tokens.sequence_mean(least).clamp(max=MAX_LOG_RATIO).exp()
    return TokenLoss(-tokens.advantages * ratio, (bounded != tokens.log_ratio) & (sign != 0) & tokens.keep)
