"""Importance weights that correct for the gap between the sampling and the training policy, within bounds.

Invariant: weights are finite, at most ``cap``, without gradient, and 0 outside the mask. The log-ratio is clamped
before the exponential, so neither an infinite log-prob nor a masked NaN can reach a sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megasync.algorithms.sequences import sequence_mean, sequence_sum


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
    """``pi_trainer / pi_behaviour`` per token (``level="token"``) or per sequence, in [floor, cap]; 1 for ``"none"``.

    A ratio outside of the bounds is replaced by the bound, or, with ``masks``, its weight is 0. All tensors are
    [tokens]. ``mask`` is non-zero on trained tokens. ``segments`` (int64, the index of each token's sequence) is
    required for sequences, and every sequence must be complete. The ratio of a sequence is the geometric mean over its
    trained tokens (``"sequence"``), which does not grow with the length, or their product (``"product"``), which is the
    exact ratio of the two probabilities of the sequence. All its tokens share the weight.

    Token level: truncated importance sampling (Ionides 2008) for the behaviour/proximal part of AReaL's decoupled
    objective (Fu et al. 2025, arXiv 2505.24298, section 5.2); with ``masks`` masked importance sampling, and with a
    ``floor`` too what Ling's authors call IcePop (arXiv 2510.18855). Sequence level: the same with the
    length-normalised ratio of GSPO (Zheng et al. 2025, arXiv 2507.18071, equation 7).

    Raises ValueError for an unknown level, and for sequences without ``segments``.
    """
    keep = mask.bool()
    if level == "none":
        return ImportanceWeights(keep.float(), torch.zeros_like(keep))
    log_ratio = _log_ratio(trainer_logprobs, behaviour_logprobs, keep, level, segments)
    low, high = _bounds(floor, cap)
    outside = keep & ((log_ratio > high) | (log_ratio < low))
    counted = keep & ~outside if masks else keep
    return ImportanceWeights(torch.where(counted, log_ratio.clamp(low, high).exp(), 0.0), outside)


@torch.no_grad()
def rejected(
    trainer_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str,
    segments: Tensor | None,
    floor: float = 0.0,
    cap: float | None = None,
) -> Tensor:
    """The trained tokens of sequences that the trainer's policy would hardly have sampled, bool [tokens].

    Arguments are those of `importance_weights`. A sequence is rejected if its ratio, the geometric mean or the product,
    is outside of [floor, cap]; with ``level="token"`` if that of any of its trained tokens is; with ``"none"`` never.
    """
    keep = mask.bool()
    if level == "none":
        return torch.zeros_like(keep)
    log_ratio = _log_ratio(trainer_logprobs, behaviour_logprobs, keep, level, segments)
    low, high = _bounds(floor, cap)
    outside = keep & ((log_ratio > high) | (log_ratio < low))
    if level != "token":
        return outside
    if segments is None:
        raise ValueError("rejection of sequences needs `segments`, the sequence index of each token")
    return keep & (sequence_sum(outside.float(), keep, segments) > 0)


def _bounds(floor: float, cap: float | None) -> tuple[float, float]:
    return math.log(floor) if floor else -math.inf, math.inf if cap is None else math.log(cap)


def _log_ratio(trainer: Tensor, behaviour: Tensor, keep: Tensor, level: str, segments: Tensor | None) -> Tensor:
    """The log-ratio of each token or of its sequence, float32 [tokens]; 0 outside ``keep`` for tokens."""
    each = torch.where(keep, trainer.float() - behaviour.float(), 0.0)
    if level == "token":
        return each
    if level not in ("sequence", "product"):
        raise ValueError(f"importance ratios are per 'token', or of a 'sequence' or its 'product', not {level!r}")
    if segments is None:
        raise ValueError("sequence-level importance ratios need `segments`, the sequence index of each token")
    return (sequence_mean if level == "sequence" else sequence_sum)(each, keep, segments)
