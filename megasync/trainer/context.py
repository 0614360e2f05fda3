"""Context parallelism: several ranks compute each sequence, and attention sees all of it.

Of every sequence, padded to a multiple of ``2 * ranks`` tokens, a rank holds the chunks ``rank`` and ``2 * ranks - 1 -
rank`` of ``2 * ranks`` equal ones. A late chunk attends to more keys than an early one, so all ranks have equal work.
This is the split of Transformer Engine's attention, which exchanges keys and values on GPUs. Without Transformer Engine
`context_attention` gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.nn.functional import pad, scaled_dot_product_attention

from megasync.trainer.packing import Ints


def split_tokens(lengths: Sequence[int], ranks: int) -> Ints:
    """The packed positions of each rank's tokens, int64 [ranks, tokens / ranks].

    ``lengths`` are those of the packed sequences, multiples of ``2 * ranks``.
    """
    order = np.stack((np.arange(ranks), 2 * ranks - 1 - np.arange(ranks)), axis=1)
    ends = np.cumsum(lengths)
    chunks = [np.arange(end - length, end).reshape(2 * ranks, -1) for end, length in zip(ends, lengths, strict=True)]
    return np.concatenate([each[order].reshape(ranks, -1) for each in chunks], axis=1)


@dataclass(frozen=True)
class ContextPlan:
    """How this rank's tokens attend to those of all ranks."""

    # Of the packed sequences.
    lengths: tuple[int, ...]
    # The positions of all ranks' tokens, rank after rank, and its inverse; [tokens].
    order: torch.Tensor
    place: torch.Tensor
    ranks: int
    rank: int


def plan_context(lengths: Sequence[int], ranks: int, rank: int, device: torch.device) -> ContextPlan:
    order = split_tokens(lengths, ranks).reshape(-1)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    there, back = (torch.from_numpy(each).to(device) for each in (order, place))
    return ContextPlan(tuple(lengths), there, back, ranks, rank)


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ContextPlan,
    scale: float | None,
    group: dist.ProcessGroup | None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's queries to the keys of all ranks; a collective, also in the backward pass.

    ``group`` are the context-parallel ranks. Other arguments, and the result, are those of `attention.packed_attention`
    for this rank's tokens.
    """
    softmax_scale = query.shape[-1] ** -0.5 if scale is None else scale
    both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=group)
    keys, values = Take.apply(both, plan.place, plan.order).split([key.shape[-1], value.shape[-1]], dim=-1)
    queries = query.split([length // plan.ranks for length in plan.lengths])
    parts, start = [], 0
    for length, mine in zip(plan.lengths, queries, strict=True):
        size = length // (2 * plan.ranks)
        for share, part in zip((plan.rank, 2 * plan.ranks - 1 - plan.rank), mine.split(size), strict=True):
            begin, end = share * size, (share + 1) * size
            first = 0 if window is None else max(0, begin - window + 1)
            first = first if chunk is None else max(first, begin // chunk * chunk)
            seen = slice(start + first, start + end)
            q, k, v = (each.transpose(0, 1)[None] for each in (part, keys[seen], values[seen]))
            places = torch.arange(first, end, device=q.device)
            mask = visible(places[begin - first :], places, window, chunk)
            if sinks is not None:
                q, k, v, mask = with_sinks(q, k, v, mask, sinks / softmax_scale)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            parts.append(out[0, ..., : value.shape[-1]].transpose(0, 1))
        start += length
    return torch.cat(parts)


class Take(torch.autograd.Function):
    """``rows[index]``, where the index after the last row yields zeros; ``inverse`` is the index of the way back.

    The gradient is a gather by ``inverse``, on a CPU much faster than the scatter-add of ordinary indexing.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return _take(rows, index)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return _take(grad, ctx.saved_tensors[0]), None, None


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if len(index) > len(rows):
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    return rows.index_select(0, index)


class FromAllRanks(torch.autograd.Function):
    """The values of all ranks, [count], from this rank's ``values``, which are those at the places ``kept``.

    A collective. Every rank must compute the same loss from the result: the backward pass takes this rank's gradients
    and adds nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, kept: torch.Tensor, count: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(kept)
        total = values.new_zeros(count).index_copy_(0, kept, values)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


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

    A sink is a score per head that takes part in the softmax and adds nothing to the output. A head that finds nothing
    to attend to gives its weight to it (https://arxiv.org/abs/2309.17453; gpt-oss learns the scores). Here it is one
    more key, so every kernel computes it: queries get a channel with the score of their head, which is 1 in the sink's
    key and 0 in the others.

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
