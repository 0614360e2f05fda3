"""One tiny random model per served family, with sizes that make the loaders pad, shard and fuse."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import torch
from random_models import ALIASES, DELTA_NET, MORE_MODELS, without
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 301,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 40}
_WINDOWS = {
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
_DELTA_NET = {
    **DELTA_NET,
    "num_hidden_layers": 4,
    # Hugging Face saves the interval only beside the kinds.
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}

FAMILIES = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {"tie_word_embeddings": True},
    # Three groups over two ranks: SGLang pads heads on a CPU.
    "mistral": {"num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": None},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {**_SHARED, "head_dim": None},
    "glm4": {"partial_rotary_factor": 0.5},
    # A layer with a window, and one without.
    "gemma3_text": {
        **_WINDOWS,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        },
    },
    # The same beside a vision tower.
    "gemma3": {
        "text_config": _WINDOWS,
        "vision_config": {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 4,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        # Published checkpoints have this; Hugging Face's class omits it.
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        # On a CPU, SGLang has only this kind for DeepSeek.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
FAMILIES |= {
    "kimi_k2": FAMILIES["deepseek_v3"] | {"n_group": 1},
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.5,
    },
    "minimax_m2": {
        "rotary_dim": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
    },
    "qwen3_next": {**_SHARED, **_DELTA_NET},
    "qwen3_5": {
        "text_config": {
            **_DELTA_NET,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
    },
    # One layer of four attends to all tokens, with larger scores from position 2 on. Chunks are as long as the context:
    # SGLang's class of the language model alone has none.
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 1024,
        "attn_scale": 0.3,
        "floor_scale": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 4,
        "swiglu_limit": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    },
}
FAMILIES["qwen3_5_moe"] = FAMILIES["qwen3_5"] | {"text_config": FAMILIES["qwen3_5"]["text_config"] | _SHARED}
# The same beside a vision tower.
FAMILIES["llama4"] = {
    "text_config": FAMILIES["llama4_text"],
    "vision_config": without(MORE_MODELS["llama4"]["vision_config"], "model_type"),
}


def make_model(path: Path, family: str, seed: int = 0, **changes: Any) -> AutoModelForCausalLM:
    """The model, saved in ``path`` without a tokenizer. Norms and biases are random too, to reveal swapped tensors."""
    own = FAMILIES[family] | changes
    kind = AutoModelForImageTextToText if "text_config" in own else AutoModelForCausalLM
    if "text_config" in own:
        text = {key: value for key, value in _SIZES.items() if key != "tie_word_embeddings"}
        sizes = own | {"text_config": text | own["text_config"]}
    else:
        # None leaves a size out.
        sizes = {name: value for name, value in (_SIZES | own).items() if value is not None or name not in _SIZES}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(ALIASES.get(family, family), **copy.deepcopy(sizes))
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    if family == "gemma3":
        # transformers 5.19 saves a tower under names that neither SGLang nor published folders have.
        file = path / "model.safetensors"
        published = {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(published, file, metadata={"format": "pt"})
    if family == "qwen3_5_moe":
        # transformers 5.19 saves experts apart; published folders have them together, as its modules.
        save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"model_type": family}))
    return model


def checkpoint_specs(path: Path) -> list[tuple[str, list[int]]]:
    """Name and shape of each tensor in ``path``'s only weights file, from its header."""
    with (path / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return [(name, entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
