"""Families whose layers all have one MLP, and the rules that other families share with them.

Transformer Engine's fused layers carry two norms under other names than the local layers; that is the only difference
between the two flavours.
"""

from __future__ import annotations

from dataclasses import replace

from megasync.layout.families.rules import HF_LAYER, LAYER, Family, Rule, Split, Tensor, of_layer
from megasync.layout.families.vision import siglip


def norm(hf: str, megatron: str, te: str | None = None, size: str = "hidden") -> Rule:
    return of_layer(Split.REPLICATED, f"{hf}.weight", (size,), f"{megatron}.weight", te)


def qkv(kind: str, *columns: str, when: str | None = None) -> Rule:
    rows = {"q": "q_rows", "k": "kv_rows", "v": "kv_rows"}
    tensors = (Tensor(f"{HF_LAYER}self_attn.{x}_proj.{kind}", (rows[x], *columns)) for x in "qkv")
    return Rule(Split.QKV, tuple(tensors), f"{LAYER}self_attention.linear_qkv.{kind}", when=when)


INPUT_NORM = norm("input_layernorm", "input_layernorm", "self_attention.linear_qkv.layer_norm_weight")
QKV_WEIGHT = qkv("weight", "hidden")
QKV_BIAS = qkv("bias")
QK_NORMS = tuple(norm(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm", size="head_dim") for x in "qk")
OUTPUT = of_layer(Split.ROW, "self_attn.o_proj.weight", ("hidden", "q_rows"), "self_attention.linear_proj.weight")
MLP_NORM_PARAMS = ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_weight")
POST_ATTENTION_NORM = norm("post_attention_layernorm", *MLP_NORM_PARAMS)
# Of a gated MLP: gate, up and down.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def gated(
    hf: str,
    megatron: str,
    size: str,
    te: str | None = None,
    names: tuple[str, str, str] = PROJECTIONS,
) -> tuple[Rule, Rule]:
    """A gated MLP's two parameters: gate and up projections of ``size`` rows fused, and the down projection.

    Args:
        hf, megatron: the prefixes of ``gate_proj.weight`` and ``linear_fc1.weight`` within the layer.
        te: pattern of the name under Transformer Engine, with ``{fc}`` for fc1 or fc2.
        names: Hugging Face's names of the gate, up and down projections.
    """
    gate_up = tuple(Tensor(f"{HF_LAYER}{hf}.{name}.weight", (size, "hidden")) for name in names[:2])
    fc1, fc2 = (te and te.replace("{fc}", fc) for fc in ("fc1", "fc2"))
    return (
        Rule(Split.GATED, gate_up, f"{LAYER}{megatron}.linear_fc1.weight", fc1 and LAYER + fc1),
        of_layer(Split.ROW, f"{hf}.{names[2]}.weight", ("hidden", size), f"{megatron}.linear_fc2.weight", fc2),
    )


MLP = (POST_ATTENTION_NORM, *gated("mlp", "mlp", "intermediate"))
GLM4_MLP = (
    POST_ATTENTION_NORM,
    of_layer(Split.GATED, "mlp.gate_up_proj.weight", ("2 * intermediate", "hidden"), "mlp.linear_fc1.weight"),
    MLP[-1],
)


def output_norms(attention: str, mlp: str) -> tuple[Rule, Rule]:
    """Norms of the outputs of attention and MLP before the residual addition; Hugging Face's names of the two."""
    return (
        norm(attention, "self_attention.linear_proj.output_layernorm"),
        norm(mlp, "mlp.linear_fc2.output_layernorm"),
    )


GLM4_OUTPUT_NORMS = output_norms("post_self_attn_layernorm", "post_mlp_layernorm")
GEMMA3_OUTPUT_NORMS = output_norms("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA3_MLP_NORM = norm("pre_feedforward_layernorm", *MLP_NORM_PARAMS)

DENSE: dict[str, Family] = {
    "llama": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, OUTPUT),
        dense=MLP,
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, OUTPUT),
        dense=MLP,
        fixed={"sliding_window": None},
        # A config.json without the key means a window.
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(layer=(INPUT_NORM, QKV_WEIGHT, QKV_BIAS, OUTPUT), dense=MLP),
    "qwen3": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, *QK_NORMS, OUTPUT),
        dense=MLP,
        fixed={"attention_bias": False},
        defaults={"head_dim": 128},
    ),
    "glm4": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, qkv("bias", when="attention_bias"), OUTPUT, *GLM4_OUTPUT_NORMS),
        dense=GLM4_MLP,
        defaults={"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "partial_rotary_factor": 0.5},
        interleaved_rotary=True,
        partial_rotary="partial_rotary_factor",
    ),
    # The language model of 270M and 1B.
    "gemma3_text": Family(
        layer=(INPUT_NORM, QKV_WEIGHT, *QK_NORMS, OUTPUT, *GEMMA3_OUTPUT_NORMS),
        dense=(GEMMA3_MLP_NORM, *MLP[1:]),
        fixed={
            "attention_bias": False,
            "hidden_activation": "gelu_pytorch_tanh",
            # SGLang ignores an output layer of its own.
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "tie_word_embeddings": True,
        },
        rope_types=("default", "linear"),
        windows=True,
        local_rotary=True,
        gelu=True,
        scaled_embeddings=True,
        zero_centered_norms=True,
    ),
}
# From 4B on, with a vision tower.
DENSE["gemma3"] = replace(
    DENSE["gemma3_text"],
    defaults={
        **DENSE["gemma3_text"].defaults,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    vision=siglip,
    root="language_model.model",
    modules="model.language_model",
)
