"""Families whose layers mostly have a gated delta net in place of attention, with full attention in every few.

Full attention has a gate for its output, whose projection shares a tensor with that of the queries.
"""

from __future__ import annotations

from dataclasses import replace

from megasync.layout.families.dense import INPUT_NORM, MLP, OUTPUT, QK_NORMS, QKV_WEIGHT, norm
from megasync.layout.families.experts import (
    EXPERTS,
    PRE_MLP_NORM,
    ROUTER,
    SHARED_EXPERT_GATE,
    packed_experts,
    shared_expert,
)
from megasync.layout.families.rules import HF_LAYER, LAYER, Family, Rule, Split, Tensor, of_layer
from megasync.layout.families.vision import qwen

HF, MEGATRON = f"{HF_LAYER}linear_attn", f"{LAYER}self_attention"

GATED_QKV_WEIGHT = replace(
    QKV_WEIGHT,
    split=Split.GATED_QKV,
    tensors=(Tensor(QKV_WEIGHT.tensors[0].name, ("2 * q_rows", "hidden")), *QKV_WEIGHT.tensors[1:]),
)
# Query, key, value and output gate of each key head in turn; likewise rate and step of the decay.
IN_PROJECTION = Rule(
    Split.SECTIONS,
    (
        Tensor(f"{HF}.in_proj_qkvz.weight", ("delta.qkvz_rows", "hidden")),
        Tensor(f"{HF}.in_proj_ba.weight", ("2 * delta.values", "hidden")),
    ),
    f"{MEGATRON}.in_proj.weight",
    sections=(("delta.key_dim",) * 2 + ("delta.group_rows",) * 2, ("delta.group",) * 2),
    grouped=True,
)
CONVOLUTION = Rule(
    Split.SECTIONS,
    (Tensor(f"{HF}.conv1d.weight", ("delta.conv_rows", 1, "delta.taps")),),
    f"{MEGATRON}.conv1d.weight",
    sections=(("delta.key_dim", "delta.key_dim", "delta.group_rows"),),
)


def per_head(name: str) -> Rule:
    return of_layer(Split.COLUMN, f"linear_attn.{name}", ("delta.values",), f"self_attention.{name}")


# The same in a tensor for queries, keys and values, section by section, and one for each of the others.
APART = Rule(
    Split.SECTIONS,
    (
        Tensor(f"{HF}.in_proj_qkv.weight", ("delta.conv_rows", "hidden")),
        Tensor(f"{HF}.in_proj_z.weight", ("delta.value_rows", "hidden")),
        Tensor(f"{HF}.in_proj_b.weight", ("delta.values", "hidden")),
        Tensor(f"{HF}.in_proj_a.weight", ("delta.values", "hidden")),
    ),
    IN_PROJECTION.local,
    sections=(("delta.key_dim", "delta.key_dim", "delta.group_rows"), ("delta.group_rows",), *[("delta.group",)] * 2),
)

DELTA_NET = (
    replace(INPUT_NORM, te=f"{MEGATRON}.in_proj.layer_norm_weight"),
    IN_PROJECTION,
    CONVOLUTION,
    per_head("A_log"),
    per_head("dt_bias"),
    replace(norm("linear_attn.norm", "self_attention.out_norm", size="delta.value_dim"), all_tokens=True),
    of_layer(
        Split.ROW, "linear_attn.out_proj.weight", ("hidden", "delta.value_rows"), "self_attention.out_proj.weight"
    ),
)

# What transformers assumes where config.json is silent.
DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
DELTA: dict[str, Family] = {
    "qwen3_next": Family(
        layer=(INPUT_NORM, GATED_QKV_WEIGHT, *QK_NORMS, OUTPUT),
        delta=DELTA_NET,
        dense=MLP,
        sparse=(PRE_MLP_NORM, ROUTER, *EXPERTS, *shared_expert("mlp.shared_expert"), SHARED_EXPERT_GATE),
        fixed={"attention_bias": False},
        defaults={
            **DEFAULTS,
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        partial_rotary="partial_rotary_factor",
        zero_centered_norms=True,
    ),
}
DELTA["qwen3_5_text"] = replace(
    DELTA["qwen3_next"],
    delta=tuple(APART if rule is IN_PROJECTION else rule for rule in DELTA_NET),
    sparse=(),
    fixed={"attention_bias": False, "attn_output_gate": True},
    defaults={**DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
)
# As published, with a vision tower.
DELTA["qwen3_5"] = replace(DELTA["qwen3_5_text"], vision=qwen, root="model.language_model")
DELTA["qwen3_5_moe"] = replace(
    DELTA["qwen3_5"],
    sparse=(
        PRE_MLP_NORM,
        ROUTER,
        *packed_experts("mlp.experts"),
        *shared_expert("mlp.shared_expert"),
        SHARED_EXPERT_GATE,
    ),
    # SGLang has experts in every layer.
    fixed={**DELTA["qwen3_5"].fixed, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={
        **DELTA["qwen3_5"].defaults,
        "num_key_value_heads": 2,
        "norm_topk_prob": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
