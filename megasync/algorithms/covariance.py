"""Losses that treat a few tokens apart: Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617).

They restrain the few tokens whose log-prob and advantage rise together most, which lower the entropy of a policy
fastest.

Invariant: which tokens they are depends neither on the packing of a minibatch nor on its ranks. `clip_cov_tokens` and
`kl_cov_tokens` guarantee this: they choose once before an optimizer step, among all of its trained tokens, those
without an advantage included, by sums over all ranks. The published code chooses within each microbatch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megasync.algorithms.losses import MAX_LOG_RATIO, Bools, Floats, PolicyTokens, StepTokens, TokenLoss

# Bits of a key, and of each of its digits by which `_largest` narrows the threshold down.
_KEY, _DIGIT = 64, 8


def clip_cov(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's clipped loss, without a gradient at the tokens that `clip_cov_tokens` has chosen."""
    free = tokens.ratio * tokens.advantages
    bounded = tokens.ratio.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages
    chosen = tokens.chosen_tokens
    return TokenLoss(torch.where(chosen, 0.0, -torch.minimum(free, bounded)), (bounded < free) | chosen)


def clip_cov_tokens(
    step: StepTokens, *, clip_low: float, clip_high: float, share: float = 0.0002, least: float = 1.0, most: float = 5.0
) -> Bools:
    """Chooses tokens with a covariance between ``least`` and ``most``: at most a ``share`` of all tokens, or one.

    They are drawn at random, without those that PPO clips.
    """
    covariance = _covariances(step)
    ratio = np.exp(np.minimum(step.logprobs - step.old, MAX_LOG_RATIO))
    clipped = np.where(step.advantages > 0, ratio > 1 + clip_high, ratio < 1 - clip_low) & (step.advantages != 0)
    eligible = (covariance > least) & (covariance < most) & ~clipped
    # Every eligible token is above all others, and among them chance decides.
    return eligible & _largest(eligible.astype(np.float64), share, step)


def kl_cov(tokens: PolicyTokens, *, coef: float = 1.0) -> TokenLoss:
    """``-ratio A``, and ``coef |log ratio|`` more at the tokens that `kl_cov_tokens` has chosen."""
    chosen = tokens.chosen_tokens
    penalty = coef * torch.where(chosen, tokens.log_ratio.abs(), 0.0)
    return TokenLoss(penalty - tokens.ratio * tokens.advantages, chosen)


def kl_cov_tokens(step: StepTokens, *, share: float = 0.0002) -> Bools:
    """The ``share`` of all tokens with the largest covariance, at least one."""
    return _largest(_covariances(step), share, step)


def _covariances(step: StepTokens) -> Floats:
    """``(A - mean A)(log pi - mean log pi)`` of each token, with means over all ranks; [tokens]."""
    local_sums = np.array([step.advantages.sum(), step.logprobs.sum(), len(step.logprobs)], dtype=np.float64)
    advantage, logprob, count = step.summed(local_sums)
    return (step.advantages - advantage / max(1.0, count)) * (step.logprobs - logprob / max(1.0, count))


def _largest(values: Floats, share: float, step: StepTokens) -> Bools:
    """Whether each value is among the ``share`` of the largest on all ranks, at least one.

    Random keys decide between equals. Ranks exchange counts of the digits of a key, from the highest one down, which
    narrows the threshold's key down.
    """
    keys = _ordered(values) << np.uint64(32) | step.random_keys
    missing, threshold = 0, np.uint64(0)
    for shift in range(_KEY - _DIGIT, -1, -_DIGIT):
        # In numpy, a shift by the whole width is undefined.
        near = np.ones(len(keys), bool) if shift + _DIGIT == _KEY else keys >> np.uint64(shift + _DIGIT) == threshold
        digits = (keys[near] >> np.uint64(shift) & np.uint64(2**_DIGIT - 1)).astype(np.int64)
        counts = step.summed(np.bincount(digits, minlength=2**_DIGIT).astype(np.float64))
        if shift + _DIGIT == _KEY:
            missing = max(1, int(share * counts.sum()))
        # Tokens whose digit is this one or a higher one.
        reached = np.cumsum(counts[::-1])[::-1]
        digit = int(np.flatnonzero(reached >= min(missing, reached[0]))[-1])
        missing -= int(reached[digit] - counts[digit])
        threshold = threshold << np.uint64(_DIGIT) | np.uint64(digit)
    return keys >= threshold


def _ordered(values: Floats) -> NDArray[np.uint64]:
    """Unsigned numbers of 32 bits in the order of the values in float32."""
    # Minus zero becomes zero.
    bits = (values.astype(np.float32) + np.float32(0.0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(2**31)).astype(np.uint64)
