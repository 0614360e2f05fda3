"""The mask of attention without Transformer Engine: a query attends to tokens of its sequence, and to a sink.

A sink is a score per head that takes part in the softmax and adds nothing to the output. A head that finds nothing to
attend to gives its weight to it (https://arxiv.org/abs/2309.17453; gpt-oss learns the scores). Here it is one more key,
so every kernel computes it: queries get a channel with the score of their head, which is 1 in the sink's key and 0 in
the others.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None, chunk: int | None) -> torch.Tensor:
    """Whether a query attends to a key, bool [..., queries, keys], from the positions of both in their sequence.

    It does to itself and to what precedes it; with a window, to the last ``window`` of these tokens; with chunks, to
    those in the same ``chunk`` positions.
    """
    queries, keys = queries[..., :, None], keys[..., None, :]
    seen = keys <= queries
    if window is not None:
        seen = seen & (queries - keys < window)
    if chunk is not None:
        seen = seen & (queries // chunk == keys // chunk)
    return seen


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
