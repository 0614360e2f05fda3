"""Families whose layers, or some of them, have a router and experts instead of one MLP.

Experts are named per expert in a checkpoint. In Megatron the local layers have a module for each expert of the rank,
and Transformer Engine's have one module with a numbered weight for each.
"""

from __future__ import annotations

from megasync.layout.families.dense import INPUT_NORM, MLP, OUTPUT, QK_NORMS, QKV_BIAS, QKV_WEIGHT, gated, norm
from megasync.layout.families.rules import Family, Rule, Split, Tensor

PRE_MLP_NORM = norm(
    "model.layers.{layer}.post_attention_layernorm.weight", "decoder.layers.{layer}.pre_mlp_layernorm.weight"
)
ROUTER = Rule(
    Split.REPLICATED,
    (Tensor("model.layers.{layer}.mlp.gate.weight", ("experts", "hidden")),),
    "decoder.layers.{layer}.mlp.router.weight",
)
EXPERTS = gated(
    "model.layers.{layer}.mlp.experts.{expert}",
    "decoder.layers.{layer}.mlp.experts.local_experts.{expert}",
    "moe_intermediate",
    te="decoder.layers.{layer}.mlp.experts.linear_{fc}.weight{expert}",
)


def shared_expert(hf: str) -> tuple[Rule, Rule]:
    """The MLP that processes every token; families name it differently."""
    return gated(f"model.layers.{{layer}}.mlp.{hf}", "decoder.layers.{layer}.mlp.shared_experts", "shared_intermediate")


SHARED_EXPERT_GATE = Rule(
    Split.REPLICATED,
    (Tensor("model.layers.{layer}.mlp.shared_expert_gate.weight", (1, "hidden")),),
    "decoder.layers.{layer}.mlp.shared_experts.gate_weight",
)

SPARSE: dict[str, Family] = {
    "qwen2_moe": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, QKV_BIAS, OUTPUT),
        dense=MLP,
        sparse=(PRE_MLP_NORM, ROUTER, *EXPERTS, *shared_expert("shared_expert"), SHARED_EXPERT_GATE),
        fixed={"qkv_bias": True},
    ),
    "qwen3_moe": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, *QK_NORMS, OUTPUT),
        dense=MLP,
        sparse=(PRE_MLP_NORM, ROUTER, *EXPERTS),
        fixed={"attention_bias": False},
    ),
}
