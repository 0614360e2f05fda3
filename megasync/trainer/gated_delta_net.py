"""The gated delta net: a layer with a state per head in place of attention (Qwen3-Next).

Megatron's own layer needs GPUs, and its version 0.16.1 supports no packed tokens. This one has Megatron's parameters
(`in_proj` with the sections q, k, v, z, b and a of this tensor rank's heads, `conv1d`, `A_log`, `dt_bias`, `out_norm`,
`out_proj`) except that the weight of `out_norm` is not stored minus 1. flash-linear-attention computes it on GPUs where
it is installed, otherwise plain torch does (`gated_delta_rule`).

With context parallelism, ranks exchange tokens for heads: each computes whole sequences for its part of the heads, with
its part of the weights, so that gradients are summed over these ranks as all others are.

Each sequence starts with an empty state and an empty convolution. A response that shares its prompt with others starts
with those that the prompt ends with, so a tree is computed once here too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import conv1d, pad, silu, softplus

from megasync.layout.families.sizes import DeltaHeads
from megasync.trainer.attention import AttentionPlan, Segment, plan_attention
from megasync.trainer.context import ContextPlan, Take, plan_context

if TYPE_CHECKING:
    from megasync.trainer.batch import PackedTokens


class DeltaNetSubmodules(NamedTuple):
    """The classes of both projections."""

    in_proj: Callable[..., torch.nn.Module]
    out_proj: Callable[..., torch.nn.Module]


class _Weighted(torch.nn.Module):
    """A submodule that only has a weight."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class GatedDeltaNet(MegatronModule):
    """The ``self_attention`` of a Megatron layer spec. ``heads`` are those of all tensor ranks, which share them."""

    def __init__(
        self, config: TransformerConfig, submodules: DeltaNetSubmodules, heads: DeltaHeads, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config)
        held = heads.over(config.tensor_model_parallel_size)
        # The heads that this rank computes. Context ranks hold the weights of the same ones and share the work.
        self._ranks, self._context = config.context_parallel_size, pg_collection.cp
        self._heads = held.over(self._ranks)
        device = torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
        linear: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            heads.in_rows,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.out_proj = submodules.out_proj(
            heads.value_rows,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))

        self.conv1d = _Weighted(parameter(held.conv_rows, 1, heads.taps))
        self.A_log, self.dt_bias = parameter(held.values), parameter(held.values)
        self.out_norm = _Weighted(parameter(heads.value_dim))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None = None, *, packed_seq_params: PackedTokens, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [tokens, 1, hidden], or the rank's own tokens under sequence parallelism; the same returned."""
        heads, packed = self._heads, packed_seq_params
        projected = self._to_heads(self.in_proj(hidden_states)[0].squeeze(1), packed)
        mixed, gate, rate, step = projected.split(heads.sections, dim=-1)
        decay = -self._own(self.A_log).float().exp() * softplus(step.float() + self._own(self.dt_bias).float())
        rate = rate.float().sigmoid()
        if mixed.is_cuda and _has_kernels():
            values = self._kernels(mixed, decay, rate, packed.cu_seqlens_q)
        else:
            values = self._plain(mixed, decay, rate, _plan(packed, mixed.device))
        # All heads share the weight, so its gradient is the sum of all tensor ranks', which have different heads.
        weight: torch.Tensor = self.out_norm.weight
        if self.config.tensor_model_parallel_size > 1:
            weight = copy_to_tensor_model_parallel_region(weight)
        gate = gate.unflatten(-1, (heads.values, heads.value_dim)).contiguous()
        normed = _GatedNorm.apply(values, gate, weight, self.config.layernorm_epsilon)
        return self.out_proj(self._to_tokens(normed.flatten(1), packed).unsqueeze(1))

    def _to_heads(self, projected: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """From the context rank's own tokens and all heads [tokens, rows], all tokens and its own heads."""
        if self._ranks == 1:
            return projected
        heads, plan = self._heads, self._split_of(packed, projected.device)
        lengths = (heads.key_rows, heads.key_rows, heads.value_rows, heads.value_rows, heads.values, heads.values)
        sections = projected.split([self._ranks * length for length in lengths], dim=-1)
        by_rank = torch.cat([section.unflatten(-1, (self._ranks, -1)) for section in sections], dim=-1)
        received = all_to_all(self._context, by_rank.transpose(0, 1).flatten(0, 1))
        return Take.apply(received, plan.place, plan.order)

    def _to_tokens(self, values: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """The way back, for outputs of all tokens and the context rank's own heads."""
        if self._ranks == 1:
            return values
        plan = self._split_of(packed, values.device)
        received = all_to_all(self._context, Take.apply(values, plan.order, plan.place))
        return received.unflatten(0, (self._ranks, -1)).transpose(0, 1).flatten(1)

    def _split_of(self, packed: PackedTokens, device: torch.device) -> ContextPlan:
        if isinstance(packed.plan, ContextPlan):
            return packed.plan
        if packed.context is None:
            starts: list[int] = packed.cu_seqlens_q.tolist()
            lengths = [end - start for start, end in pairwise(starts)]
            packed.context = plan_context(lengths, self._ranks, self._context.rank(), device)
        return packed.context

    def _own(self, weight: torch.Tensor, *sections: int) -> torch.Tensor:
        """The context rank's part of a weight, of each of its sections if there are several."""
        if self._ranks == 1:
            return weight
        parts = weight.split([self._ranks * length for length in sections]) if sections else (weight,)
        return torch.cat([part.chunk(self._ranks)[self._context.rank()] for part in parts])

    def _conv_weight(self) -> torch.Tensor:
        heads = self._heads
        return self._own(self.conv1d.weight, heads.key_rows, heads.key_rows, heads.value_rows)

    def _plain(self, mixed: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """The outputs of all tokens, [tokens, value heads, value channels]."""
        weight = self._conv_weight()
        taps = weight.shape[-1]
        tails: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        spread = (plan.spread(each) for each in (mixed, decay, rate))
        for rectangle, before, decays, rates in zip(plan.rectangles, *spread, strict=True):
            prefixes, state = rectangle.prefixes, None
            before = pad(before, (0, 0, taps - 1, 0))
            if prefixes:
                # The prompts' last tokens precede those of the responses in the convolution.
                prompts, state = tails[prefixes.source], states[prefixes.source].index_select(0, prefixes.rows)
                last = prefixes.lengths[:, None] + torch.arange(taps - 1, device=mixed.device)
                tail = prompts[prefixes.rows[:, None], last]
                before = torch.cat((tail, before[:, taps - 1 :]), dim=1)
            convolved = silu(conv1d(before.mT, weight, groups=len(weight))).mT
            query, key, value = (part.transpose(1, 2).float() for part in self._split(convolved))
            query = unit(query) * query.shape[-1] ** -0.5
            output, state = gated_delta_rule(query, unit(key), value, decays.mT, rates.mT, state)
            tails.append(before)
            states.append(state)
            outputs.append(output.transpose(1, 2).to(mixed.dtype))
        return plan.gather(outputs)

    def _kernels(
        self, mixed: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """The same by flash-linear-attention. ``starts`` [sequences + 1] are those of sequences, and the end."""
        from fla.modules.convolution import (  # pyright: ignore[reportMissingImports] - an extra of GPU environments
            causal_conv1d,
        )
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
        )

        starts = starts.long()
        weight = self._conv_weight().squeeze(1)
        convolved, _ = causal_conv1d(mixed[None].contiguous(), weight, activation="silu", cu_seqlens=starts)
        query, key, value = (part.contiguous() for part in self._split(convolved))
        output, _ = chunk_gated_delta_rule(
            query,
            key,
            value,
            g=decay[None],
            beta=rate[None].to(value.dtype),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
        )
        return output[0]

    def _split(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value [..., value heads, channels] of convolved channels [..., channels]."""
        heads = self._heads
        query, key, value = convolved.split((heads.key_rows, heads.key_rows, heads.value_rows), dim=-1)
        query, key = (part.unflatten(-1, (heads.keys, heads.key_dim)) for part in (query, key))
        query, key = (part.repeat_interleave(heads.values // heads.keys, dim=-2) for part in (query, key))
        return query, key, value.unflatten(-1, (heads.values, heads.value_dim))


class _GatedNorm(torch.autograd.Function):
    """`_gated_norm`, computed again in the backward pass: its float32 tensors are much larger than its inputs."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        ctx.save_for_backward(values, gate, weight)
        ctx.epsilon = epsilon
        return _gated_norm(values, gate, weight, epsilon)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - autograd passes one gradient per output
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        inputs = values, gate, weight = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = _gated_norm(values, gate, weight, ctx.epsilon)
        return *torch.autograd.grad(output, inputs, grad), None


def _gated_norm(values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """``values`` normalised head by head and gated, both [tokens, value heads, value channels]."""
    wide = values.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * wide.to(values.dtype) * silu(gate.float())).to(values.dtype)


@cache
def _has_kernels() -> bool:
    return find_spec("fla") is not None


def _plan(packed: PackedTokens, device: torch.device) -> AttentionPlan:
    """The plan of a microbatch, made from the starts of its sequences if Transformer Engine computes its attention."""
    if isinstance(packed.plan, AttentionPlan):
        return packed.plan
    if packed.sequences is None:
        starts: list[int] = packed.cu_seqlens_q.tolist()
        segments = [Segment(start, end - start, None) for start, end in pairwise(starts) if end > start]
        packed.sequences = plan_attention(segments, device)
    return packed.sequences


# The gated delta rule in plain torch (Gated Delta Networks, https://arxiv.org/abs/2412.06464)
#
# Each head has a state S, a matrix of key channels by value channels. A token with key k, value v, decay a and rate b
# makes it ``a S + k (b (v - k (a S)))``, and its output is ``q S``. Tokens are computed in chunks. Within one, the
# writes of all tokens are the solution of a triangular system (section 3.3 of the paper), so only chunks follow each
# other.

# Tokens whose writes are solved together.
CHUNK = 64
# Added to the sum of squares of a query or key before it is normalised, as in flash-linear-attention.
NORM_EPSILON = 1e-6


def unit(channels: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 along the last dimension."""
    return channels * torch.rsqrt(channels.square().sum(-1, keepdim=True) + NORM_EPSILON)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all tokens, and the states after the last.

    A token with a zero key, a zero rate and a zero decay leaves the state as it is: padding.

    Args:
        query, key: float32 [batch, heads, tokens, key channels], normalised; the query also scaled.
        value: float32 [batch, heads, tokens, value channels].
        decay: float32 [batch, heads, tokens], the logarithm of the factor of the state, 0 or less.
        rate: float32 [batch, heads, tokens].
        state: float32 [batch, heads, key channels, value channels] before the first token; None for zeros.

    Returns:
        float32 [batch, heads, tokens, value channels], and states as ``state``.
    """
    tokens = query.shape[2]
    size = min(CHUNK, tokens)
    missing = -tokens % size
    query, key, value = (pad(part, (0, 0, 0, missing)).unflatten(2, (-1, size)) for part in (query, key, value))
    decay, rate = (pad(part, (0, missing)).unflatten(2, (-1, size)) for part in (decay, rate))

    total = decay.cumsum(-1)
    upper = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    # From token j to a later token i of the chunk. The others would overflow.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
    grown = total.exp()[..., None]
    scaled_key = key * rate[..., None]
    # What a token reads of the writes before it in its chunk; the diagonal counts as ones.
    reads = scaled_key @ key.mT * between
    inputs = torch.cat((value * rate[..., None], scaled_key * grown), dim=-1)
    solved = torch.linalg.solve_triangular(reads, inputs, upper=False, unitriangular=True)
    writes, state_reads = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    within = query @ key.mT * between
    query, last = query * grown, total[..., -1:]
    key, kept = (key * (last - total).exp()[..., None]).mT, last.exp()[..., None]

    current = value.new_zeros(*value.shape[:2], key.shape[-2], value.shape[-1]) if state is None else state
    outputs: list[torch.Tensor] = []
    for chunk in range(query.shape[2]):
        written = writes[:, :, chunk] - state_reads[:, :, chunk] @ current
        outputs.append(query[:, :, chunk] @ current + within[:, :, chunk] @ written)
        current = current * kept[:, :, chunk] + key[:, :, chunk] @ written
    return torch.cat(outputs, dim=2)[:, :, :tokens], current
