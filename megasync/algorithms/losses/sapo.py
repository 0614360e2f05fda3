"""SAPO: a smooth gate in place of a clip."""

from __future__ import annotations

import torch

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def sapo(tokens: PolicyTokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """``-(4 / tau) sigmoid(tau (ratio - 1)) A``, with a temperature for either sign of A.

    arXiv 2511.20347. The paper takes the mean of sequences
    (``algorithm.aggregation=sequence``).
    """
    tau = torch.full_like(tokens.advantages, tau_negative).masked_fill(tokens.advantages > 0, tau_positive)
    return TokenLoss(-torch.sigmoid(tau * (tokens.ratio - 1.0)) * (4.0 / tau) * tokens.advantages)
