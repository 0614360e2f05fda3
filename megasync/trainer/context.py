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
from torch.nn.functional import scaled_dot_product_attention

from megasync.trainer.attention_mask import visible
from megasync.trainer.attention_sinks import with_sinks
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
    """How this rank's tokens attend to those of all ranks.

    ``lengths`` are those of the packed sequences. ``order`` [tokens] are the positions of all ranks' tokens, rank after
    rank, and ``place`` [tokens] is its inverse.
    """

    lengths: tuple[int, ...]
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

    Args:
        query: [tokens of this rank, heads, dim].
        key: [tokens of this rank, groups, dim].
        value: [tokens of this rank, groups, value dim].
        scale: of the scores; dim ** -0.5 by default.
        group: the context-parallel ranks.
        window: the number of tokens that a query attends to, its own included; None for all.
        sinks: [heads]; see `attention_sinks`.
        chunk: the number of positions of a chunk, outside of which a query attends to nothing; None for no chunks.

    Returns:
        [tokens of this rank, heads, value dim].
    """
    softmax_scale = query.shape[-1] ** -0.5 if scale is None else scale
    both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=group)
    keys, values = Reorder.apply(both, plan.place, plan.order).split([key.shape[-1], value.shape[-1]], dim=-1)
    queries = query.split([length // plan.ranks for length in plan.lengths])
    parts, start = [], 0
    for length, mine in zip(plan.lengths, queries, strict=True):
        size = length // (2 * plan.ranks)
        for share, part in zip((plan.rank, 2 * plan.ranks - 1 - plan.rank), mine.split(size), strict=True):
            own, end = share * size, (share + 1) * size
            first = 0 if window is None else max(0, own - window + 1)
            first = first if chunk is None else max(first, own // chunk * chunk)
            seen = slice(start + first, start + end)
            q, k, v = (each.transpose(0, 1)[None] for each in (part, keys[seen], values[seen]))
            places = torch.arange(first, end, device=q.device)
            mask = visible(places[own - first :], places, window, chunk)
            if sinks is not None:
                q, k, v, mask = with_sinks(q, k, v, mask, sinks / softmax_scale)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
            parts.append(out[0, ..., : value.shape[-1]].transpose(0, 1))
        start += length
    return torch.cat(parts)


class Reorder(torch.autograd.Function):
    """``rows[index]`` of a permutation, whose gradient is a gather by its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, kept: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(kept)
        whole = own.new_zeros(count).index_copy_(0, kept, own)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def from_all_ranks(own: torch.Tensor, kept: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The values of all ranks, [count], from this rank's, [own], which are those at the places ``kept``.

    A collective. Every rank must compute the same loss from the result: the backward pass takes this rank's gradients
    and adds nothing.
    """
    return _Whole.apply(own, kept, count, group)
