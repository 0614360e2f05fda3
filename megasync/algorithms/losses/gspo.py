"""GSPO: PPO's clip of the ratio of whole sequences."""

from __future__ import annotations

import torch

from megasync.algorithms.kl import MAX_LOG_RATIO
from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def gspo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped loss with the geometric mean of a sequence's ratios in place of each token's ratio.

    Its token form, GSPO-token: ``s = sg[exp(mean of log ratios)] * pi / sg[pi]``, so that each token gets the gradient
    of its own log-prob. Zheng et al. 2025, arXiv 2507.18071. The paper clips at 3e-4 and 4e-4, and
    takes the mean of sequences (``algorithm.aggregation=sequence``).
    """
    of_sequence = tokens.sequence_mean(tokens.log_ratio).detach()
    ratio = (of_sequence + tokens.logprobs - tokens.logprobs.detach()).clamp(max=MAX_LOG_RATIO).exp()
    free, bounded = ratio * tokens.advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages
    return TokenLoss(-torch.minimum(free, bounded), bounded < free)
