"""Megatron layer specs for the layers of a model chunk, in the local or the Transformer Engine flavour.

The local flavour uses this package's norm and attention, because Megatron's local ones support neither sequence
parallelism nor packed tokens. The Transformer Engine flavour uses grouped experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megasync.layout.layout import Layout
from megasync.trainer.architecture import Chunks, chunks_of
from megasync.trainer.attention import TreeAttention
from megasync.trainer.chunked_attention import core_attention
from megasync.trainer.gated_attention import GatedAttention
from megasync.trainer.gated_delta_net import DeltaNetSubmodules, GatedDeltaNet
from megasync.trainer.head_norms import AllHeadsNorm, UnweightedNorm
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
