"""Tiny models of every family with random weights, as Hugging Face folders."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from megasync.layout.families import language_model
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


# Two groups (one in qwen3): tensor parallelism over 2 ranks splits them evenly, over 4 it cuts through them. The
# vocabulary is odd on purpose, and 3 layers make uneven stages.
BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "llama": {
        **BASE,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 12,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {
        **BASE,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "rope_theta": 5000.0,
    },
    "qwen3": {
        **BASE,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    },
}
# A number of layers that two stages of two chunks can share.
FOUR = {**BASE, "num_hidden_layers": 4}
DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
# Families beside the first three: experts with and without a shared one, a dense layer among the sparse.
MORE_MODELS = {
    "qwen3_moe": {
        **FOUR,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        **FOUR,
        **EXPERTS,
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
    },
    "mistral": {
        **FOUR,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 16,
        "sliding_window": None,
        "rope_theta": 10000.0,
    },
    "glm4": {
        **FOUR,
        "model_type": "glm4",
        "architectures": ["Glm4ForCausalLM"],
        "head_dim": 16,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    },
}
# Windows in two layers of three, each kind of layer with its own rotary base, scores scaled by another number than the
# size of a head, and embeddings small enough for their factor.
MORE_MODELS["gemma3_text"] = {
    **FOUR,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "rope_theta": 50000.0,
    "rope_local_base_freq": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}
LATENTS = {
    **FOUR,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_experts_per_tok": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
}
# Latent attention with and without a latent for queries, with yarn and plainly rotated; groups of experts or none.
MORE_MODELS |= {
    "deepseek_v3": {
        **LATENTS,
        "q_lora_rank": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 4,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3_plain": {
        **LATENTS,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
# Hugging Face's name of a model type that it lacks.
ALIASES = {"kimi_k2": "deepseek_v3"}
# DeepSeek-V3 under another name, and GLM-4.5 with and without norms and biases.
MORE_MODELS["kimi_k2"] = {**MORE_MODELS["deepseek_v3"], "model_type": "kimi_k2", "n_group": 1, "topk_group": 1}
MORE_MODELS["glm4_moe"] = {
    **FOUR,
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "num_experts_per_tok": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
}
MORE_MODELS["glm4_moe_plain"] = {
    **MORE_MODELS["glm4_moe"],
    "attention_bias": False,
    "use_qk_norm": False,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 2,
    "tie_word_embeddings": True,
}
# Norms over all heads, rotary on half of each head, and experts in every layer.
MORE_MODELS["minimax_m2"] = {
    **FOUR,
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "intermediate_size": 32,
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_theta": 10000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
}
# Windows in every other layer, sinks, biases everywhere, and values on both sides of the clamps.
MORE_MODELS["gpt_oss"] = {
    **FOUR,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "intermediate_size": 32,
    "head_dim": 16,
    "attention_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}
# Chunks in three layers of four, the last of which attends to all tokens and makes scores larger from position 5 on;
# experts in every other layer.
MORE_MODELS["llama4_text"] = {
    **FOUR,
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": True,
    "attention_chunk_size": 6,
    "attn_temperature_tuning": True,
    "attn_scale": 0.3,
    "floor_scale": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
# Without norms of queries and keys, temperature and scaled angles; experts in every layer, and a tied embedding.
MORE_MODELS["llama4_text_plain"] = {
    **MORE_MODELS["llama4_text"],
    "interleave_moe_layer_step": 1,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "tie_word_embeddings": True,
}
MORE_MODELS["llama4_text"]["rope_scaling"] = MODELS["llama"]["rope_scaling"]

# Three layers with a gated delta net, one with gated attention; two value heads for each key head, and experts. Where a
# head reads next to nothing from its state, its norm with a smaller epsilon would enlarge rounding errors.
MORE_MODELS["qwen3_next"] = {
    **FOUR,
    **EXPERTS,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "rms_norm_eps": 1e-3,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "full_attention_interval": 4,
    **DELTA_NET,
    "linear_conv_kernel_dim": 4,
}
# A tensor of the delta net for queries, keys and values, and one for each other section of its projection; no experts.
MORE_MODELS["qwen3_5_text"] = {
    **without(
        MORE_MODELS["qwen3_next"], *EXPERTS, "shared_expert_intermediate_size", "norm_topk_prob", "mlp_only_layers"
    ),
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [2, 1, 1]},
}
# From folders with a vision tower, whose sizes differ so that a key that is read from the wrong part shows.
MORE_MODELS["gemma3"] = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 4,
    "text_config": without(MORE_MODELS["gemma3_text"], "architectures", "hidden_act", "tie_word_embeddings"),
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    },
}
MORE_MODELS["qwen3_5"] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": without(MORE_MODELS["qwen3_5_text"], "architectures"),
    "vision_config": {
        "model_type": "qwen3_5",
        "depth": 2,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    },
}
# Experts in tensors of all experts, none of them transposed.
MORE_MODELS["qwen3_5_moe"] = {
    **MORE_MODELS["qwen3_5"],
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        **without(MORE_MODELS["qwen3_5"]["text_config"], "intermediate_size"),
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
    },
}
# A tower and a projector beside the language model, whose output layer has a name of its own as well.
MORE_MODELS["llama4"] = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": without(MORE_MODELS["llama4_text"], "architectures"),
    "vision_config": {
        "model_type": "llama4_vision_model",
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "projector_input_dim": 40,
        "projector_output_dim": 40,
        "vision_output_dim": 40,
    },
}


def write_model(folder: Path, config: dict, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A Hugging Face folder with random weights, without a tokenizer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    layout = Layout(language_model(config), Topology())
    for name, shape in layout.hf_tensors.items():
        # A delta net normalises its small queries and keys, and so enlarges their rounding errors.
        noise = torch.randn(shape, generator=generator) * (0.5 if "conv1d" in name else 0.1)
        # Norms multiply by about 1. That of a delta net's output has no 1 of its own.
        stored = "norm" in name and (not layout.family.zero_centered_norms or "linear_attn" in name)
        tensors[name] = (noise + 1.0 if stored else noise).to(getattr(torch, layout.hf_dtype(name, _name(dtype))))
    for name, shape in layout.frozen_tensors.items():
        tensors[name] = (torch.randn(shape, generator=generator) * 0.1).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "dtype": _name(dtype)}))
    return folder


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[1]
