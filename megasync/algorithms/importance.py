"""Importance weights that correct for the gap between the sampling and the training policy, within bounds.

Invariant: weights are finite, at most ``cap``, without gradient, and 0 outside the mask. The log-ratio is clamped
before the exponential, so neither an infinite log-prob nor a masked NaN can reach a sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megasync.algorithms.sequences import sequence_mean


class ImportanceWeights(NamedTuple):
    """``weights`` [tokens] float32, and ``outside`` [tokens] bool, true where the ratio is outside of its bounds."""

    weights: Tensor
    outside: Tensor


@torch.no_grad()
def importance_weights(
    trainer_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str,
    cap: float,
    floor: float = 0.0,
    masks: bool = False,
    segments: Tensor | None = None,
) -> ImportanceWeights:
    """``pi_trainer / pi_behaviour`` per token (``level="token"``) or per sequence (``"sequence"``), in [floor, cap].

    A ratio outside of the bounds is replaced by the bound, or, with ``masks``, its weight is 0. All tensors are
    [tokens]. ``mask`` is non-zero on trained tokens. ``segments`` (int64, the index of each token's sequence) is
    required for ``"sequence"``, and every sequence must be complete. The ratio of a sequence is the geometric mean over
    its trained tokens, so it does not grow with the length; all its tokens share the weight.

    Token level: truncated importance sampling (Ionides 2008) for the behaviour/proximal part of AReaL's decoupled
    objective (Fu et al. 2025, arXiv 2505.24298, section 5.2); with ``masks`` masked importance sampling, and with a
    ``floor`` too what Ling's authors call IcePop (arXiv 2510.18855). Sequence level: the same with the
    length-normalised ratio of GSPO (Zheng et al. 2025, arXiv 2507.18071, equation 7).

    Raises ValueError for an unknown level, and for ``"sequence"`` without ``segments``.
    """
    keep = mask.bool()
    log_ratio = torch.where(keep, trainer_logprobs.float() - behaviour_logprobs.float(), 0.0)
    if level == "sequence":
        if segments is None:
            raise ValueError("sequence-level importance weights need `segments`, the sequence index of each token")
        log_ratio = sequence_mean(log_ratio, keep, segments)
    elif level != "token":
        raise ValueError(f"importance weights are per 'token' or per 'sequence', not {level!r}")
    low, high = math.log(floor) if floor else -math.inf, math.log(cap)
    outside = keep & ((log_ratio > high) | (log_ratio < low))
    counted = keep & ~outside if masks else keep
    return ImportanceWeights(torch.where(counted, log_ratio.clamp(low, high).exp(), 0.0), outside)
