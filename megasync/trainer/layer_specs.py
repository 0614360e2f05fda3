"""Megatron layer specs for the layers of a model chunk, in the local or the Transformer Engine flavour.

After the specs come the small layers of them that Megatron lacks or computes otherwise.

The local flavour uses this package's norm and attention, because Megatron's local ones support neither sequence
parallelism nor packed tokens. The Transformer Engine flavour uses grouped experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import rms_norm

from megasync.layout.layout import Layout
from megasync.trainer.architecture import Chunks, chunks_of
from megasync.trainer.attention import TreeAttention
from megasync.trainer.batch import PackedTokens
from megasync.trainer.context import ContextPlan
from megasync.trainer.gated_delta_net import DeltaNetSubmodules, GatedDeltaNet
from megasync.trainer.latent_attention import LatentAttention
from megasync.trainer.rotary import WindowedRotaryAttention
from megasync.trainer.routing import PolicyRouter


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor. Megatron's own wrapper does not support sequence parallelism.

    With Megatron's ``layernorm_zero_centered_gamma`` it multiplies by 1 plus the weight, in float32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self._zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._zero_centered:
            return super().forward(x)
        return torch.nn.functional.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(
            x.dtype
        )


class NormedOutput(torch.nn.Module):
    """Mixin for the last linear layer of attention or an MLP that normalises its output before the residual.

    GLM-4 and Gemma 3 have it. What an adapter adds (`adapters.LowRank`) comes before the norm.
    """

    norm: Callable[..., torch.nn.Module]

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.output_layernorm = self.norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        if (adapter := getattr(self, "adapter", None)) is not None:
            output = output + adapter(self, *args)
        return self.output_layernorm(output), bias


class _Alternating(torch.nn.Module):
    """Mixin for a linear layer whose output channels alternate between gate and up (gpt-oss): returns gate, then up."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return _apart(output), None if bias is None else _bias_apart(bias)


def _bias_apart(bias: torch.Tensor | list[torch.Tensor]) -> Any:
    return [_apart(each) for each in bias] if isinstance(bias, list) else _apart(bias)


def _apart(channels: torch.Tensor) -> torch.Tensor:
    """[..., channels], first those at even places, then those at odd ones."""
    return channels.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class _Copied(torch.nn.Module):
    """Mixin for an expert's last linear layer: Megatron's local experts add the bias to its output in place.

    Autograd refuses that for a view that a function of Megatron returned.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output.clone(), bias


def chunk_specs(
    config: TransformerConfig, layout: Layout, layers: range, flavour: str, rope: Mapping[str, Any]
) -> ModuleSpec | TransformerBlockSubmodules:
    """The specs of a chunk's ``layers`` (global indices); ``rope`` comes from `architecture.rope_parameters`."""
    sizes, chunks = layout.sizes, chunks_of(layout.hf_config)
    full = chunks.full if chunks else frozenset[int]()
    kinds = [(layer in sizes.sparse_layers, layer in sizes.delta_layers, layer in full) for layer in layers]
    specs = {kind: _layer_spec(config, layout, *kind, chunks, flavour, rope) for kind in set(kinds)}
    # Megatron accepts a class here, although it does not declare so.
    return TransformerBlockSubmodules([specs[kind] for kind in kinds], _norm(flavour))  # pyright: ignore[reportArgumentType]


def _norm(flavour: str) -> Any:
    """The class of norms that are not part of a linear layer."""
    if flavour != "te":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layer_spec(
    config: TransformerConfig,
    layout: Layout,
    sparse: bool,
    delta: bool,
    full: bool,
    chunks: Chunks | None,
    flavour: str,
    rope: Mapping[str, Any],
) -> ModuleSpec:
    """The spec of a kind of layer. ``full``: it attends to all tokens where others do in ``chunks``."""
    experts = config.num_moe_experts if sparse else None
    if flavour == "te":
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=sparse,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
    else:
        spec = _local_spec(config, experts)
    layer = _submodules(spec)
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
        layer.self_attention.params["rope"] = rope
    elif delta:
        projections = layer.self_attention.submodules
        linear = DeltaNetSubmodules(projections.linear_qkv, projections.linear_proj)
        net: Any = ModuleSpec(GatedDeltaNet, params={"heads": layout.sizes.delta}, submodules=linear)
        layer.self_attention = net
    elif layout.family.gates_attention:
        layer.self_attention.module = GatedAttention
    elif layout.family.local_rotary:
        layer.self_attention.module = WindowedRotaryAttention
    elif chunks:
        attention = layer.self_attention.submodules
        attention.core_attention = core_attention(attention.core_attention, chunks, full)
        normed = chunks.normed and not full
        attention.q_layernorm = attention.k_layernorm = UnweightedNorm if normed else IdentityOp
    elif layout.family.norms_all_heads:
        attention = layer.self_attention.submodules
        heads = config.num_attention_heads, config.num_query_groups
        attention.q_layernorm, attention.k_layernorm = (
            type("AllHeadsNorm", (AllHeadsNorm,), {"heads": count}) for count in heads
        )
    if sparse:
        _submodules(layer.mlp).router = PolicyRouter
        if layout.family.clamped:
            experts = _submodules(_submodules(layer.mlp).experts)
            experts.linear_fc1 = type("AlternatingProjection", (_Alternating, experts.linear_fc1), {})
            if flavour == "local":
                experts.linear_fc2 = type("CopiedProjection", (_Copied, experts.linear_fc2), {})
    if layout.family.norms_outputs:
        attention, mlp = layer.self_attention.submodules, _submodules(layer.mlp)
        members = {"norm": staticmethod(_norm(flavour))}
        attention.linear_proj = type("NormedProjection", (NormedOutput, attention.linear_proj), members)
        mlp.linear_fc2 = type("NormedProjection", (NormedOutput, mlp.linear_fc2), members)
    return spec


def _local_spec(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer = _submodules(spec)
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = TreeAttention
    if isinstance(config, MLATransformerConfig):
        attention.kv_layernorm = RMSNorm
        # megatron-core 0.19 rejects a norm without an input.
        attention.q_layernorm = IdentityOp if config.q_lora_rank is None else RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _submodules(part: ModuleSpec | partial[Any]) -> Any:
    """The submodules of a spec; megatron-core 0.19 passes them as constructor arguments."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm over heads and their channels (MiniMax-M2), with the constructor of Megatron's norms of one head.

    Tensor ranks share it: each has the channels of its own heads and the weights for them, and the mean of squares is
    that of all ranks. ``hidden_size`` is the width of a head.
    """

    # On all tensor ranks.
    heads: int

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())
        ranks = config.tensor_model_parallel_size
        channels = self.heads // ranks * hidden_size
        self.weight = torch.nn.Parameter(torch.empty(channels, dtype=config.params_dtype, device=device))
        self._eps, self._ranks, self._width = eps, ranks, self.heads * hidden_size

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """``heads`` [..., heads of this rank, channels], normalised in float32."""
        channels = heads.flatten(-2).float()
        squares = channels.square().sum(-1, keepdim=True)
        if self._ranks > 1:
            # The sum of all ranks, whose gradient is the sum of all ranks' gradients.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = channels * torch.rsqrt(squares / self._width + self._eps)
        return (normed.to(heads.dtype) * self.weight).view_as(heads)


class UnweightedNorm(torch.nn.Module):
    """RMSNorm of each head without weights (Llama 4), with Megatron's constructor. Megatron's own is compiled."""

    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self._eps = eps

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """``heads`` [..., channels], normalised in float32."""
        return rms_norm(heads, heads.shape[-1:], eps=self._eps)


class GatedAttention(SelfAttention):
    """Attention whose output is multiplied by the sigmoid of a gate (Qwen3-Next), with its own split of the projection.

    Megatron has it, but its version 0.16.1 fails with more tensor ranks than key-value groups, because it leaves each
    rank the gates of the whole group.
    """

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride] - called by name
        self, hidden_states: torch.Tensor, key_value_states: None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key, value and gate, each [tokens, 1, local heads or groups, channels]."""
        modules: Any = self
        mixed, _ = modules.linear_qkv(hidden_states)
        groups, ranks = self.config.num_query_groups, self.config.tensor_model_parallel_size
        assert groups is not None
        heads, dim = self.config.num_attention_heads // groups, self.hidden_size_per_attention_head
        # Ranks that share a group. Rows are cut contiguously, so each has any part of the group's.
        sharing, rank = max(1, ranks // groups), self.pg_collection.tp.rank()
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed)
            mixed = mixed.unflatten(-1, (groups, -1))[:, :, rank // sharing]
        mixed = mixed.unflatten(-1, (-1, (2 * heads + 2) * dim))
        query, gate, key, value = mixed.split((heads * dim, heads * dim, dim, dim), dim=-1)
        local_heads = heads // sharing
        query, gate = (
            part.unflatten(-1, (heads, dim)).narrow(-2, rank % sharing * local_heads, local_heads).flatten(2, 3)
            for part in (query, gate)
        )
        return modules.q_layernorm(query), modules.k_layernorm(key), value, gate


# Attention within chunks of a sequence, and layers among them that attend to all tokens (Llama 4)
#
# Both are mixins of a layer's core attention. Megatron's own layers attend by a plan, whose masks know chunks
# (`context.visible`). Transformer Engine attends within packed sequences, so each chunk is given to it as one: chunks
# begin at the multiples of their size in a sequence, which is where `chunked` cuts.


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
