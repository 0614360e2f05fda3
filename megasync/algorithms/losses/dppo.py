"""DPPO: tokens whose policy has moved too far, by a divergence of two outcomes, have no gradient.

The two outcomes are this token and any other: arXiv 2602.04879. The ratio is truncated at
``max_ratio`` and has no gradient; ``clip_low`` and ``clip_high`` are thresholds of the divergence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss

# Keeps the logarithm of the other outcome finite.
_EPS = 1e-8


def dppo_tv(tokens: PolicyTokens, *, clip_low: float, clip_high: float, max_ratio: float = 20.0) -> TokenLoss:
    """DPPO with the total variation ``|pi - pi_old|``."""
    moved = tokens.logprobs.exp() - tokens.old.exp()
    return _masked(tokens, moved <= clip_high, moved >= -clip_low, max_ratio)


def dppo_kl(tokens: PolicyTokens, *, clip_low: float, clip_high: float, max_ratio: float = 20.0) -> TokenLoss:
    """DPPO with the divergence ``KL(pi_old || pi)``."""
    new, old = tokens.logprobs.exp(), tokens.old.exp()
    divergence = old * (tokens.old - tokens.logprobs) + (1 - old) * torch.log((1 - old + _EPS) / (1 - new + _EPS))
    return _masked(tokens, (divergence <= clip_high) | (new <= old), (divergence <= clip_low) | (new >= old), max_ratio)


def _masked(tokens: PolicyTokens, if_positive: Tensor, if_negative: Tensor, max_ratio: float) -> TokenLoss:
    """``-ratio A log pi`` where the condition for the sign of A holds."""
    near = torch.where(tokens.advantages > 0, if_positive, if_negative).detach()
    weight = tokens.ratio.clamp(max=max_ratio).detach() * near
    truncated = near & (tokens.ratio > max_ratio) & tokens.keep
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, ~near & tokens.keep, truncated)
