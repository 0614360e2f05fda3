"""Which tokens of its sequence a query attends to, for attention without Transformer Engine."""

from __future__ import annotations

import torch


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
