"""Families with multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Queries, and keys together with values, are projected down to a narrow latent, normalised, and projected up to the
heads. All heads share one rotated key. Megatron's local layers split the rows of the down projections over tensor
ranks; Transformer Engine's keep them whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megasync.layout.families.dense import MLP, norm
from megasync.layout.families.experts import NO_PREDICTION_LAYERS, SIGMOID_ROUTING, SPARSE_WITH_BIAS
from megasync.layout.families.rules import Family, Rule, Split, of_layer


def projection(hf: str, megatron: str, rows: str, columns: str, **options: Any) -> Rule:
    names = f"self_attn.{hf}.weight", (rows, columns), f"self_attention.{megatron}.weight"
    return of_layer(Split.COLUMN, *names, **options)


def latent_norm(x: str, size: str) -> Rule:
    te = f"self_attention.linear_{x}_up_proj.layer_norm_weight"
    return norm(f"self_attn.{x}_a_layernorm", f"self_attention.{x}_layernorm", te, size)


INPUT_NORM = norm("input_layernorm", "input_layernorm")
ATTENTION = (
    projection("q_proj", "linear_q_proj", "q_rows", "hidden", unless="q_lora_rank"),
    projection("q_a_proj", "linear_q_down_proj", "q_lora", "hidden", te_split=Split.REPLICATED, when="q_lora_rank"),
    # SGLang fuses it with q_a_proj.
    projection(
        "kv_a_proj_with_mqa", "linear_kv_down_proj", "kv_a_rows", "hidden", te_split=Split.REPLICATED, joined=True
    ),
    replace(latent_norm("q", "q_lora"), when="q_lora_rank"),
    projection("q_b_proj", "linear_q_up_proj", "q_rows", "q_lora", when="q_lora_rank"),
    latent_norm("kv", "kv_lora"),
    projection("kv_b_proj", "linear_kv_up_proj", "kv_b_rows", "kv_lora"),
    of_layer(Split.ROW, "self_attn.o_proj.weight", ("hidden", "value_rows"), "self_attention.linear_proj.weight"),
)

DEEPSEEK_V3 = Family(
    layer=(INPUT_NORM, *ATTENTION),
    dense=MLP,
    sparse=SPARSE_WITH_BIAS,
    fixed={
        **SIGMOID_ROUTING,
        "attention_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        # Hugging Face normalises the latents with this epsilon whatever the config says, SGLang with the config's.
        "rms_norm_eps": 1e-6,
    },
    defaults={
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    exported=NO_PREDICTION_LAYERS,
    rope_types=("default", "yarn"),
    latent=True,
)
# Kimi-K2 is DeepSeek-V3 under another name. SGLang knows that name, Hugging Face does not.
LATENT: dict[str, Family] = {"deepseek_v3": DEEPSEEK_V3, "kimi_k2": DEEPSEEK_V3}
