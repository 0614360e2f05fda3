"""Causal attention over packed segments, for layers without Transformer Engine.

Megatron's local attention does not support packed tokens. Here, segments of similar length are padded to a rectangle
and computed by one call of torch's scaled dot product attention. Padding follows each segment, where the causal mask
hides it. Moving tokens into rectangles and back is a gather in both directions of autograd (`context.Take`), because
every token has exactly one place in one rectangle.

A layer may have a sliding window, which ends as many tokens before a query, or chunks, of which a query sees its own up
to itself, and sinks (`context.with_sinks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch.nn.functional import scaled_dot_product_attention

from megasync.trainer.context import ContextPlan, Take, context_attention, visible, with_sinks

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
    """A range of packed tokens. ``prefix`` is the index of the segment that it continues, or None.

    Segments of several owners share no rectangle, so each is computed as without the others.
    """

    start: int
    length: int
    prefix: int | None
    owner: int = 0


@dataclass(frozen=True)
class Prefixes:
    """The prompts that the segments of a rectangle continue."""

    # The rectangle of the prompts.
    source: int
    # The row of each prompt in it, and its length; [batch].
    rows: torch.Tensor
    lengths: torch.Tensor


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
    """How segments attend: the rectangles of one microbatch."""

    # Roots before those that continue them.
    rectangles: tuple[Rectangle, ...]
    # The token at each place, counted over all rectangles, or the number of tokens for padding; [places].
    token: torch.Tensor
    # The place of each token, [tokens].
    place: torch.Tensor
    _masks: dict[tuple[int, int | None, int | None], torch.Tensor] = field(default_factory=dict)

    def spread(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """From [tokens, ...], one [batch, length, ...] per rectangle, with zeros at padding."""
        flat = Take.apply(packed, self.token, self.place)
        parts = zip(flat.split([rectangle.places for rectangle in self.rectangles]), self.rectangles, strict=True)
        return [part.view(rectangle.batch, rectangle.length, *packed.shape[1:]) for part, rectangle in parts]

    def gather(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `spread`."""
        return Take.apply(torch.cat([part.flatten(0, 1) for part in parts]), self.place, self.token)

    def mask(self, index: int, window: int | None, chunk: int | None) -> torch.Tensor:
        """Where the queries of a rectangle may attend, bool [batch or 1, 1, length, prompt length + length].

        A query attends to itself and what precedes it in its prompt and its segment; with a window, to the last
        ``window`` of these tokens; with chunks, to those in its own ``chunk`` positions of the sequence. Computed at
        the first call, for all layers.
        """
        if (index, window, chunk) not in self._masks:
            self._masks[index, window, chunk] = self._mask(self.rectangles[index], window, chunk)
        return self._masks[index, window, chunk]

    def _mask(self, rectangle: Rectangle, window: int | None, chunk: int | None) -> torch.Tensor:
        device = self.token.device
        steps = torch.arange(rectangle.length, device=device)
        prefixes = rectangle.prefixes
        if prefixes is None:
            return visible(steps, steps, window, chunk)[None, None]
        prompt = torch.arange(self.rectangles[prefixes.source].length, device=device)
        lengths = prefixes.lengths[:, None]
        queries = lengths + steps
        seen = visible(queries, prompt, window, chunk) & (prompt < lengths)[:, None]
        return torch.cat((seen, visible(queries, queries, window, chunk)), dim=-1)[:, None]


def plan_attention(segments: Sequence[Segment], device: torch.device) -> AttentionPlan:
    """Groups segments into rectangles; computed once per microbatch and used by every layer."""
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        root = -1 if segment.prefix is None else _length_class(segments[segment.prefix].length)
        kinds.setdefault((root, segment.owner, _length_class(segment.length)), []).append(index)
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
        source = order.index((-1, kind[1], kind[0]))
        roots = [root for index in members if (root := segments[index].prefix) is not None]
        rows = torch.tensor([row_of[root] for root in roots], device=device)
        prompts = torch.tensor([segments[root].length for root in roots], device=device)
        rectangles.append(Rectangle(len(members), length, Prefixes(source, rows, prompts)))
    token = torch.cat(places)
    place = torch.empty(tokens + 1, dtype=torch.int64)
    place[token] = torch.arange(len(token))
    return AttentionPlan(tuple(rectangles), token.to(device), place[:tokens].to(device))


def _length_class(length: int) -> int:
    """The class of similar lengths that a length belongs to."""
    return 0 if length <= SHORT else math.ceil(math.log(length / SHORT, RATIO))


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Attention of packed tokens.

    Args:
        query: [tokens, heads, dim].
        key: [tokens, groups, dim].
        value: [tokens, groups, value dim].
        scale: of the scores; dim ** -0.5 by default.
        window: the number of tokens that a query attends to, its own included; None for all.
        sinks: [heads]; see `context.with_sinks`.
        chunk: the number of positions of a chunk, outside of which a query attends to nothing; None for no chunks.

    Returns:
        [tokens, heads, value dim].
    """
    softmax_scale: float = query.shape[-1] ** -0.5 if scale is None else scale
    # One [batch, heads, length, dim] per rectangle.
    queries, keys, values = ([part.transpose(1, 2) for part in plan.spread(each)] for each in (query, key, value))
    outputs = []
    for index, (rectangle, q, k, v) in enumerate(zip(plan.rectangles, queries, keys, values, strict=True)):
        if prefixes := rectangle.prefixes:
            k = torch.cat((keys[prefixes.source].index_select(0, prefixes.rows), k), dim=2)
            v = torch.cat((values[prefixes.source].index_select(0, prefixes.rows), v), dim=2)
        limits = [limit if limit is not None and limit < k.shape[2] else None for limit in (window, chunk)]
        mask = None
        if sinks is not None:
            q, k, v, mask = with_sinks(q, k, v, plan.mask(index, *limits), sinks / softmax_scale)
        elif prefixes or any(limits):
            mask = plan.mask(index, *limits)
        plain = q.device.type == "cpu" and q.dtype != torch.float32 and q.shape[2] * k.shape[2] <= FEW_SCORES
        if plain:
            out = _plain_attention(q, k, v, mask, softmax_scale)
        else:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
            )
        outputs.append(out[..., : value.shape[2]].transpose(1, 2))
    return plan.gather(outputs)


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
    """The ``core_attention`` of a Megatron layer spec; `PackedTokens.plan` determines which tokens attend to which.

    A layer's window and sinks are those of Megatron's configuration; each tensor rank has the sinks of its own heads.
    A subclass may have chunks (`layer_specs.core_attention`).
    """

    chunk: int | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self._window = None
        if config.window_size and is_layer_window_attention(
            config.window_size,
            config.window_attn_skip_freq,  # pyright: ignore[reportArgumentType] - None means every layer
            layer_number,
        ):
            # Megatron counts the tokens before the query.
            self._window = config.window_size[0] + 1
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            device = torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
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
        limits = {"window": self._window, "chunk": self.chunk, "sinks": self.softmax_offset}
        if isinstance(plan, ContextPlan):
            return context_attention(query, key, value, plan, self._scale, self._context, **limits)
        return packed_attention(query, key, value, plan, self._scale, **limits)
