"""Causal attention over packed segments, for layers without Transformer Engine.

Megatron's local attention does not support packed tokens. Here, segments of similar length are padded to a rectangle
and computed by one call of torch's scaled dot product attention. Padding follows each segment, where the causal mask
hides it. Moving tokens into rectangles and back is a gather in both directions of autograd, because every token has
exactly one place in one rectangle (`AttentionPlan.place`, `AttentionPlan.token`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from megasync.trainer.context import ContextPlan, context_attention

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

# Segments share a rectangle if their lengths are within this ratio, which bounds the wasted work by its square. All
# lengths up to SHORT share one, because there a call costs more than the padding.
RATIO = 1.3
SHORT = 32
# On a CPU, torch's kernel for 16-bit floats takes twice the time of plain matrix products up to this many scores per
# head (queries x keys). Above, the memory of the scores matters more.
FEW_SCORES = 2**16


class Segment(NamedTuple):
    """A range of packed tokens. ``prefix`` is the index of the segment that it continues, or None."""

    start: int
    length: int
    prefix: int | None


@dataclass(frozen=True)
class Prefixes:
    """The prompts that the segments of a rectangle continue.

    ``source`` is the rectangle of the prompts, ``rows`` [batch] the row of each prompt in it, and ``mask`` [batch, 1,
    length, prompt length + length] is true where a query may attend.
    """

    source: int
    rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Rectangle:
    """``batch`` segments padded to ``length``; ``prefixes`` if they continue prompts."""

    batch: int
    length: int
    prefixes: Prefixes | None = None

    @property
    def places(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class AttentionPlan:
    """Rectangles of one microbatch, roots before those that continue them.

    ``token`` [places]: the token at each place, counted over all rectangles, or the number of tokens for padding.
    ``place`` [tokens]: the place of each token.
    """

    rectangles: tuple[Rectangle, ...]
    token: torch.Tensor
    place: torch.Tensor


def plan_attention(segments: Sequence[Segment], device: torch.device) -> AttentionPlan:
    """Groups segments into rectangles; computed once per microbatch and used by every layer."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        root = -1 if segment.prefix is None else _rung(segments[segment.prefix].length)
        kinds.setdefault((root, _rung(segment.length)), []).append(index)
    # Roots (-1) sort before the segments that continue them.
    order = sorted(kinds)
    tokens = sum(segment.length for segment in segments)
    rectangles: list[Rectangle] = []
    places: list[torch.Tensor] = []
    row_of = {index: row for members in kinds.values() for row, index in enumerate(members)}
    for kind in order:
        members = kinds[kind]
        length = max(segments[index].length for index in members)
        starts = torch.tensor([segments[index].start for index in members])
        lengths = torch.tensor([segments[index].length for index in members])
        steps = torch.arange(length)
        places.append(torch.where(steps < lengths[:, None], starts[:, None] + steps, tokens).flatten())
        if kind[0] < 0:
            rectangles.append(Rectangle(len(members), length))
            continue
        source = order.index((-1, kind[0]))
        roots = [root for index in members if (root := segments[index].prefix) is not None]
        rows = torch.tensor([row_of[root] for root in roots])
        mask = _mask([segments[root].length for root in roots], rectangles[source].length, length)
        rectangles.append(Rectangle(len(members), length, Prefixes(source, rows.to(device), mask.to(device))))
    token = torch.cat(places)
    place = torch.empty(tokens + 1, dtype=torch.int64)
    place[token] = torch.arange(len(token))
    return AttentionPlan(tuple(rectangles), token.to(device), place[:tokens].to(device))


def _rung(length: int) -> int:
    """The class of similar lengths that a length belongs to."""
    return 0 if length <= SHORT else math.ceil(math.log(length / SHORT, RATIO))


def _mask(prefix_lengths: list[int], prefix: int, length: int) -> torch.Tensor:
    """[batch, 1, length, prefix + length]: a query attends to its whole prompt and to its segment up to itself."""
    prompt = torch.arange(prefix) < torch.tensor(prefix_lengths)[:, None]
    own = torch.ones(length, length, dtype=torch.bool).tril()
    rows = len(prefix_lengths)
    return torch.cat((prompt[:, None, :].expand(rows, length, prefix), own.expand(rows, -1, -1)), dim=-1)[:, None]


class _Take(torch.autograd.Function):
    """``rows[index]``, where the index after the last row yields zeros; ``inverse`` is the index of the way back.

    The gradient is a gather by ``inverse``, on a CPU much faster than the scatter-add of ordinary indexing.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index, inverse)
        return _take(rows, index)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        return _take(grad, ctx.saved_tensors[1]), None, None


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if len(index) > len(rows):
        rows = torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))
    return rows.index_select(0, index)


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float | None = None
) -> torch.Tensor:
    """Attention of packed tokens.

    Args:
        query: [tokens, heads, dim].
        key: [tokens, groups, dim].
        value: [tokens, groups, value dim].
        scale: of the scores; dim ** -0.5 by default.

    Returns:
        [tokens, heads, value dim].
    """
    softmax_scale: float = query.shape[-1] ** -0.5 if scale is None else scale
    shapes = [(rectangle.batch, rectangle.length) for rectangle in plan.rectangles]
    sizes = [rectangle.places for rectangle in plan.rectangles]

    def place(packed: torch.Tensor) -> list[torch.Tensor]:
        """One [batch, heads, length, dim] per rectangle."""
        flat = _Take.apply(packed, plan.token, plan.place)
        parts = zip(flat.split(sizes), shapes, strict=True)
        return [part.view(*shape, *packed.shape[1:]).transpose(1, 2) for part, shape in parts]

    queries, keys, values = place(query), place(key), place(value)
    outputs = []
    for rectangle, q, k, v in zip(plan.rectangles, queries, keys, values, strict=True):
        mask = None
        if prefixes := rectangle.prefixes:
            k = torch.cat((keys[prefixes.source].index_select(0, prefixes.rows), k), dim=2)
            v = torch.cat((values[prefixes.source].index_select(0, prefixes.rows), v), dim=2)
            mask = prefixes.mask
        plain = q.device.type == "cpu" and q.dtype != torch.float32 and q.shape[2] * k.shape[2] <= FEW_SCORES
        if plain:
            out = _plain_attention(q, k, v, mask, softmax_scale)
        else:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
            )
        outputs.append(out.transpose(1, 2).reshape(rectangle.places, query.shape[1], value.shape[2]))
    return _Take.apply(torch.cat(outputs), plan.place, plan.token)


def _plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Equal to torch's attention, with the heads of a group folded into the rows of one matrix product."""
    batch, heads, length, dim = q.shape
    groups = k.shape[1]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()[None, None]
    scores = (q * scale).reshape(batch, groups, -1, dim) @ k.transpose(-1, -2)
    scores = scores.view(batch, heads, length, -1).masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights.view(batch, groups, -1, k.shape[2]) @ v).view(batch, heads, length, -1)


class TreeAttention(torch.nn.Module):
    """The ``core_attention`` of a Megatron layer spec; `PackedTokens.plan` determines which tokens attend to which."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._context = pg_collection.cp if pg_collection else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Any,
        **_: Any,
    ) -> torch.Tensor:
        plan = packed_seq_params.plan
        if isinstance(plan, ContextPlan):
            return context_attention(query, key, value, plan, self._scale, self._context)
        return packed_attention(query, key, value, plan, self._scale)
