"""Clip-Cov and KL-Cov: restrain the few tokens whose log-prob and advantage rise together most.

These lower the entropy of a policy fastest. Cui et al. 2025, arXiv 2505.22617. Covariances are
of the tokens of a microbatch, those without an advantage included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def clip_cov(
    tokens: PolicyTokens,
    *,
    clip_low: float,
    clip_high: float,
    share: float = 0.0002,
    least: float = 1.0,
    most: float = 5.0,
) -> TokenLoss:
    """PPO's clipped loss; of the tokens with a covariance between ``least`` and ``most``, some have no gradient.

    They are drawn at random, at most a ``share`` of all tokens and at least one; the same ones on every rank.
    """
    advantages = tokens.advantages
    free = tokens.ratio * advantages
    bounded = tokens.ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded < free
    covariance = _covariances(tokens)
    eligible = torch.nonzero((covariance > least) & (covariance < most) & tokens.keep & ~clipped)[:, 0]
    count = max(int(share * int(tokens.keep.sum())), 1)
    # Tensor-parallel ranks compute the same loss, so they must draw the same tokens.
    order = torch.randperm(len(eligible), generator=torch.Generator().manual_seed(len(eligible)))
    drawn = torch.zeros_like(tokens.keep)
    drawn[eligible[order[:count].to(eligible.device)]] = True
    return TokenLoss(torch.where(drawn, 0.0, -torch.minimum(free, bounded)), clipped | drawn)


def kl_cov(tokens: PolicyTokens, *, share: float = 0.0002, coef: float = 1.0) -> TokenLoss:
    """``-ratio A``, and for the ``share`` of tokens with the largest covariance ``coef |log ratio|`` more."""
    loss = -tokens.ratio * tokens.advantages
    kept = int(tokens.keep.sum())
    if not kept:
        return TokenLoss(loss)
    covariance = torch.where(tokens.keep, _covariances(tokens), -torch.inf)
    largest = torch.topk(covariance, max(1, int(share * kept))).indices
    penalised = torch.zeros_like(tokens.keep).index_fill(0, largest, True)
    return TokenLoss(loss + coef * torch.where(penalised, tokens.log_ratio.abs(), 0.0), penalised)


def _covariances(tokens: PolicyTokens) -> Tensor:
    """``(A - mean A)(log pi - mean log pi)`` of each token, [tokens]; without gradient."""
    logprobs = tokens.logprobs.detach()
    return (tokens.advantages - tokens.mean(tokens.advantages)) * (logprobs - tokens.mean(logprobs))
