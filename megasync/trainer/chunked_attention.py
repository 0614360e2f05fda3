"""Attention within chunks of a sequence, and layers among them that attend to all tokens (Llama 4).

Both are mixins of a layer's core attention. Megatron's own layers attend by a plan, whose masks know chunks
(`attention_mask`). Transformer Engine attends within packed sequences, so each chunk is given to it as one: chunks
begin at the multiples of their size in a sequence, which is where `chunked` cuts.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from megasync.trainer.architecture import Chunks
from megasync.trainer.attention import TreeAttention
from megasync.trainer.batch import PackedTokens
from megasync.trainer.context import ContextPlan


def core_attention(base: Any, chunks: Chunks, full: bool) -> Any:
    """The core attention of a layer that attends to all tokens (``full``) or in chunks, made of its flavour's own."""
    if full:
        if chunks.temperature is None:
            return base
        return type("TemperedAttention", (_Tempered, base), {"temperature": chunks.temperature})
    kinds = (base,) if base is TreeAttention else (_Chunked, base)
    return type("ChunkedAttention", kinds, {"chunk": chunks.size})


class _Chunked(torch.nn.Module):
    """Attends within chunks of the packed sequences, for Transformer Engine."""

    chunk: int

    def forward(self, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, packed_seq_params=chunked(packed_seq_params, self.chunk), **kwargs)


class _Tempered(torch.nn.Module):
    """Makes the scores of late queries larger (`architecture.Chunks.temperature`)."""

    temperature: tuple[float, int]

    def forward(self, query: torch.Tensor, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> torch.Tensor:
        scale, steps = self.temperature
        position = positions(packed_seq_params, len(query)).to(query.device)
        factor = 1.0 + scale * torch.log1p(torch.floor((position.float() + 1.0) / steps))
        query = (query * factor[:, None, None]).to(query.dtype)
        return super().forward(query, *args, packed_seq_params=packed_seq_params, **kwargs)


def chunked(packed: PackedTokens, size: int) -> PackedTokens:
    """The same tokens with each chunk of ``size`` positions as a sequence, made by the first layer that needs it."""
    if packed.max_seqlen_q <= size:
        return packed
    if packed.chunks is None:
        starts: list[int] = packed.cu_seqlens_q.tolist()
        borders = [at for start, end in pairwise(starts) for at in range(start, end, size)]
        cut = torch.tensor([*borders, starts[-1]], dtype=torch.int32, device=packed.cu_seqlens_q.device)
        packed.chunks = replace(packed, cu_seqlens_q=cut, cu_seqlens_kv=cut, max_seqlen_q=size, max_seqlen_kv=size)
    return packed.chunks


def positions(packed: PackedTokens, tokens: int) -> torch.Tensor:
    """The position of each of a rank's ``tokens`` in its sequence, int64 [tokens]."""
    if packed.positions is not None:
        return packed.positions
    starts, plan = packed.cu_seqlens_q.long(), packed.plan
    ranks = plan.ranks if isinstance(plan, ContextPlan) else 1
    total = tokens * ranks
    first = torch.repeat_interleave(starts[:-1], starts.diff(), output_size=total)
    places = torch.arange(total, device=starts.device) - first
    return places[plan.order.chunk(ranks)[plan.rank]] if isinstance(plan, ContextPlan) else places
