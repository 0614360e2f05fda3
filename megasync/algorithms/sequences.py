"""Sums and means over the sequences of a packed microbatch."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
    """The sum of the kept values of each token's sequence, [tokens].

    ``segments`` (int64) is the sequence of each token; outside of ``keep`` (bool) it may be anything.
    """
    if not values.numel():
        return values
    segments = torch.where(keep, segments, 0)
    total = values.new_zeros(int(segments.max()) + 1).index_add(0, segments, torch.where(keep, values, 0.0))
    return total[segments]


def sequence_mean(values: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
    """The mean of the kept values of each token's sequence, [tokens]; as `sequence_sum`."""
    count = sequence_sum(keep.to(values.dtype), keep, segments)
    return sequence_sum(values, keep, segments) / count.clamp(min=1)
