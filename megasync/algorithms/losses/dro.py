"""DRO: a policy gradient with a quadratic penalty on the log ratio."""

from __future__ import annotations

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def dro(tokens: PolicyTokens, *, beta: float = 0.1) -> TokenLoss:
    """``-(A log pi - beta / 2 (log pi - log pi_old)^2)``. Richemond et al. 2024, arXiv 2405.19107.

    Tokens without an advantage are penalised too.
    """
    return TokenLoss(0.5 * beta * tokens.log_ratio.square() - tokens.advantages * tokens.logprobs)
