"""Means over the sequences of a packed microbatch."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_mean(values: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
    """The mean of the kept values of each token's sequence, [tokens].

    ``segments`` (int64) is the sequence of each token; outside of ``keep`` (bool) it may be anything.
    """
    if not values.numel():
        return values
    segments = torch.where(keep, segments, 0)
    size = int(segments.max()) + 1
    total = values.new_zeros(size).index_add(0, segments, torch.where(keep, values, 0.0))
    count = values.new_zeros(size).index_add(0, segments, keep.to(values.dtype))
    return (total / count.clamp(min=1))[segments]
