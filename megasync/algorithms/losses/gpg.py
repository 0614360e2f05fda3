"""GPG: the plain policy gradient."""

from __future__ import annotations

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def gpg(tokens: PolicyTokens) -> TokenLoss:
    """``-A log pi``, without a ratio. Chu et al. 2025, arXiv 2504.02546."""
    return TokenLoss(-tokens.advantages * tokens.logprobs)
