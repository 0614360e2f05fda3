"""Families whose layers, or some of them, have a router and experts instead of one MLP.

Experts are named per expert in a checkpoint, except those of gpt-oss, Llama 4 and Qwen3.5. In Megatron the local layers
have a module for each expert of the rank, and Transformer Engine's have one module with a numbered weight for each.
"""

from __future__ import annotations

from dataclasses import replace

from megasync.layout.families.dense import (
    INPUT_NORM,
    MLP,
    OUTPUT,
    PROJECTIONS,
    QK_NORMS,
    QKV_BIAS,
    QKV_WEIGHT,
    gated,
    norm,
    qkv,
)
from megasync.layout.families.rules import HF_LAYER, Family, Rule, Split, Tensor, of_layer
from megasync.layout.families.vision import llama4

PRE_MLP_NORM = norm("post_attention_layernorm", "pre_mlp_layernorm")


def router(hf: str) -> Rule:
    """The router's weight, whose tensor families name differently."""
    return of_layer(Split.REPLICATED, hf, ("experts", "hidden"), "mlp.router.weight")


def experts(hf: str, names: tuple[str, str, str] = PROJECTIONS) -> tuple[Rule, Rule]:
    """The MLP of each expert, whose tensors begin with ``hf``; ``names`` as in `gated`."""
    local, te = "mlp.experts.local_experts.{expert}", "mlp.experts.linear_{fc}.weight{expert}"
    return gated(f"{hf}.experts.{{expert}}", local, "moe_intermediate", te, names)


ROUTER, EXPERTS = router("mlp.gate.weight"), experts("mlp")


def packed_experts(hf: str, *, transposed: bool = False) -> tuple[Rule, Rule]:
    """The same with each projection of all experts in one tensor; gate rows precede up rows."""
    shapes = {"gate_up_proj": ("2 * moe_intermediate", "hidden"), "down_proj": ("hidden", "moe_intermediate")}
    gate_up, down = (
        replace(
            rule,
            tensors=(Tensor(f"{HF_LAYER}{hf}.{name}", ("experts", *(shape[::-1] if transposed else shape))),),
            stacked=True,
            transposed=transposed,
        )
        for rule, (name, shape) in zip(EXPERTS, shapes.items(), strict=True)
    )
    return gate_up, down


def shared_expert(hf: str) -> tuple[Rule, Rule]:
    """The MLP that processes every token; families name it differently."""
    return gated(hf, "mlp.shared_experts", "shared_intermediate")


SHARED_EXPERT_GATE = of_layer(
    Split.REPLICATED, "mlp.shared_expert_gate.weight", (1, "hidden"), "mlp.shared_experts.gate_weight"
)


def router_bias(hf: str) -> Rule:
    """The bias that influences which experts are chosen, not their weights; receives no gradient."""
    return of_layer(Split.REPLICATED, hf, ("experts",), "mlp.router.expert_bias", dtype="float32")


SPARSE_WITH_BIAS = (
    PRE_MLP_NORM,
    ROUTER,
    router_bias("mlp.gate.e_score_correction_bias"),
    *EXPERTS,
    *shared_expert("mlp.shared_experts"),
)
SIGMOID_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
# Multi-token-prediction layers come after the last one and serve only speculative decoding: the policy's log-probs do
# not depend on them. They are neither loaded nor trained, so an export has none.
NO_PREDICTION_LAYERS = {"num_nextn_predict_layers": 0}

# MiniMax-M2 normalises queries and keys over all heads together, so tensor ranks share these norms' weights.
ALL_HEADS_NORMS = tuple(
    replace(rule, split=Split.COLUMN, tensors=(replace(rule.tensors[0], shape=(rows,)),))
    for rule, rows in zip(QK_NORMS, ("q_rows", "kv_rows"), strict=True)
)


def stacked_experts(x: str, fc: str, rows: str, columns: str) -> tuple[Rule, Rule]:
    """A projection of gpt-oss's experts and its bias, each in one tensor of all experts.

    In the columns of ``gate_up_proj``, gate and up alternate. Megatron's parameters keep that order.
    """

    def stacked(kind: str, name: str, shape: tuple[str, ...]) -> Rule:
        local, te = f"mlp.experts.local_experts.{{expert}}.linear_{fc}", f"mlp.experts.linear_{fc}"
        names = f"mlp.experts.{name}", shape, f"{local}.{kind}", f"{te}.{kind}{{expert}}"
        return of_layer(Split.COLUMN, *names, stacked=True, transposed=True)

    return stacked("weight", x, ("experts", columns, rows)), stacked("bias", f"{x}_bias", ("experts", rows))


SINKS = of_layer(Split.COLUMN, "self_attn.sinks", ("heads",), "self_attention.core_attention.softmax_offset")
OUTPUT_BIAS = of_layer(Split.REPLICATED, "self_attn.o_proj.bias", ("hidden",), "self_attention.linear_proj.bias")

SPARSE: dict[str, Family] = {
    "qwen2_moe": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, QKV_BIAS, OUTPUT),
        dense=MLP,
        sparse=(PRE_MLP_NORM, ROUTER, *EXPERTS, *shared_expert("mlp.shared_expert"), SHARED_EXPERT_GATE),
        fixed={"qkv_bias": True},
    ),
    "qwen3_moe": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, *QK_NORMS, OUTPUT),
        dense=MLP,
        sparse=(PRE_MLP_NORM, ROUTER, *EXPERTS),
        fixed={"attention_bias": False},
    ),
    "glm4_moe": Family(
        layer=(
            INPUT_NORM,
            QKV_WEIGHT,
            qkv("bias", when="attention_bias"),
            *(replace(rule, when="use_qk_norm") for rule in QK_NORMS),
            OUTPUT,
        ),
        dense=MLP,
        sparse=SPARSE_WITH_BIAS,
        fixed=SIGMOID_ROUTING,
        defaults={
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        exported=NO_PREDICTION_LAYERS,
        partial_rotary="partial_rotary_factor",
    ),
    "minimax_m2": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, *ALL_HEADS_NORMS, OUTPUT),
        dense=MLP,
        sparse=(
            PRE_MLP_NORM,
            router("block_sparse_moe.gate.weight"),
            router_bias("block_sparse_moe.e_score_correction_bias"),
            *experts("block_sparse_moe", ("w1", "w3", "w2")),
        ),
        fixed={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
        },
        # Where config.json lacks the first three, SGLang computes without them, and Hugging Face with them.
        defaults={
            "use_qk_norm": False,
            "use_routing_bias": False,
            "scoring_func": "softmax",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        spelling={"moe_intermediate_size": "intermediate_size"},
        partial_rotary="rotary_dim",
    ),
    "gpt_oss": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, QKV_BIAS, SINKS, OUTPUT, OUTPUT_BIAS),
        dense=MLP,
        sparse=(
            PRE_MLP_NORM,
            router("mlp.router.weight"),
            of_layer(Split.REPLICATED, "mlp.router.bias", ("experts",), "mlp.router.bias"),
            *stacked_experts("gate_up_proj", "fc1", "2 * moe_intermediate", "hidden"),
            *stacked_experts("down_proj", "fc2", "hidden", "moe_intermediate"),
        ),
        # Megatron's SwiGLU has this gain.
        fixed={"attention_bias": True, "swiglu_alpha": 1.702},
        defaults={
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "norm_topk_prob": True,
        },
        spelling={"moe_intermediate_size": "intermediate_size"},
        rope_types=("yarn",),
        windows=True,
        clamped=True,
        mxfp4=True,
    ),
    # The language model alone.
    "llama4_text": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, OUTPUT),
        dense=(MLP[0], *gated("feed_forward", "mlp", "intermediate")),
        sparse=(
            PRE_MLP_NORM,
            router("feed_forward.router.weight"),
            *packed_experts("feed_forward.experts", transposed=True),
            *shared_expert("feed_forward.shared_expert"),
        ),
        # Megatron applies the weight of one expert to its input, not those of several.
        fixed={"attention_bias": False, "num_experts_per_tok": 1},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "rope_theta": 5e5,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
        spelling={
            "moe_intermediate_size": "intermediate_size",
            "shared_expert_intermediate_size": "intermediate_size",
            "intermediate_size": "intermediate_size_mlp",
            "decoder_sparse_step": "interleave_moe_layer_step",
        },
        interleaved_rotary=True,
        chunks=True,
        scales_expert_inputs=True,
    ),
}
# As published, with a vision tower.
SPARSE["llama4"] = replace(
    SPARSE["llama4_text"],
    # transformers and SGLang do not tie by the option of the same part of config.json.
    fixed={**SPARSE["llama4_text"].fixed, "tie_word_embeddings": False},
    defaults={
        **SPARSE["llama4_text"].defaults,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    vision=llama4,
    root="language_model.model",
)
