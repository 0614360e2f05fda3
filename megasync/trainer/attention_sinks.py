"""Attention sinks: a score per head that takes part in the softmax and adds nothing to the output.

A head that finds nothing to attend to gives its weight to the sink (https://arxiv.org/abs/2309.17453; gpt-oss learns
the scores). Here a sink is one more key, so every kernel computes it: queries get a channel with the score of their
head, which is 1 in the sink's key and 0 in the others.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values and mask of attention with sinks; its output has an additional last channel of zeros.

    Args:
        query: [batch, heads, queries, dim].
        key: [batch, groups, keys, dim].
        value: [batch, groups, keys, value dim].
        mask: bool, broadcast to [batch, heads, queries, keys]; true where a query may attend.
        sinks: [heads], divided by the scale of the scores.
    """
    scores = sinks[:, None, None].expand(*query.shape[:3], 1).to(query.dtype)
    key = pad(key, (0, 1, 1, 0))
    # All keys but the first have a zero there.
    key[:, :, 0, -1] = 1.0
    return torch.cat((query, scores), dim=-1), key, pad(value, (0, 1, 1, 0)), pad(mask, (1, 0), value=True)
