"""Lets SGLang 0.5.23 compute Llama 4 on CPUs without AMX.

Its attention takes rotated queries and keys from the tensors that GPU kernels rotate in place, which the CPU's does not
do, and rounds them to bfloat16 before their norms. Its experts on a CPU refuse weights that are applied to their input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megasync_patches import Patch


def _attention(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    if self.rotary_emb is not None:
        q, k = self.rotary_emb(positions, q, k)
    if self.qk_norm is not None:
        q, k = (self.qk_norm(x.reshape(-1, self.head_dim)).view(x.shape) for x in (q, k))
    if self.attn_temperature_tuning and not self.use_rope:
        q = self._mul_attn_scale(positions=positions, q=q)
    output, _ = self.o_proj(self.attn(q, k, v, forward_batch))
    return output


def apply() -> None:
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.models import llama4

    compute = fused_moe_native.moe_forward_native

    def experts(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        if config.apply_router_weight_on_input:
            # [tokens, 1], since a token has one expert.
            weights = topk_output.topk_weights
            x, topk_output = x * weights.to(x.dtype), topk_output._replace(topk_weights=torch.ones_like(weights))
            config = replace(config, apply_router_weight_on_input=False)
        return compute(layer, x, topk_output, config)

    fused_moe_native.moe_forward_native = experts
    llama4.Llama4Attention.forward = _attention


PATCH = Patch(
    name="sglang_cpu_llama4",
    package="sglang",
    versions=("0.5.23",),
    reason="on a CPU without AMX SGLang computes Llama 4 without its rotary embedding, and refuses its experts",
    apply=apply,
)
