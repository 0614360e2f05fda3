"""CISPO: a policy gradient whose importance weight is clipped, instead of its surrogate."""

from __future__ import annotations

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """``-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log pi``: every token keeps a gradient.

    MiniMax 2025, arXiv 2506.13585. The paper has no lower bound: ``clip_low=1``.
    """
    weight = tokens.ratio.clamp(1 - clip_low, 1 + clip_high).detach()
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, (weight != tokens.ratio) & tokens.keep)
