"""Vision towers as data: the tensors of a model folder that are not part of its language model.

They are frozen, so names and shapes are enough. Servers load them from the model folder and keep them, and an export
copies them as they are stored. Trainer ranks, checkpoints and weight syncs do not have them (`Layout.hf_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megasync.errors import ConfigError
from megasync.layout.families.sizes import whole_number

Shapes = dict[str, tuple[int, ...]]
# Makes the tensors from ``vision_config`` and the hidden size of the language model.
Tower = Callable[[Mapping[str, Any], int], Shapes]

# What transformers assumes where config.json leaves a key out.
SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}


def siglip(vision: Mapping[str, Any], hidden: int) -> Shapes:
    """Gemma 3's SigLIP tower and the projector behind it. Raises ConfigError for sizes that are no whole numbers."""
    if vision.get("vision_use_head", True):
        raise ConfigError("vision_config.vision_use_head in config.json must be false: SGLang's tower has no such head")
    width, inner, layers, channels, image, patch = _sizes(vision, SIGLIP)
    root = "vision_tower.vision_model"
    shapes: Shapes = {
        f"{root}.embeddings.patch_embedding.weight": (width, channels, patch, patch),
        f"{root}.embeddings.patch_embedding.bias": (width,),
        f"{root}.embeddings.position_embedding.weight": ((image // patch) ** 2, width),
    }
    for layer in range(layers):
        at = f"{root}.encoder.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _with_bias(f"{at}.self_attn.{projection}", width, width)
        shapes |= _with_bias(f"{at}.mlp.fc1", inner, width) | _with_bias(f"{at}.mlp.fc2", width, inner)
        shapes |= _with_bias(f"{at}.layer_norm1", width) | _with_bias(f"{at}.layer_norm2", width)
    shapes |= _with_bias(f"{root}.post_layernorm", width)
    return shapes | {
        "multi_modal_projector.mm_input_projection_weight": (width, hidden),
        "multi_modal_projector.mm_soft_emb_norm.weight": (width,),
    }


QWEN = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}


def qwen(vision: Mapping[str, Any], hidden: int) -> Shapes:
    """Qwen3.5's tower. Raises ConfigError for sizes that are no whole numbers or do not fit the language model."""
    if (out := vision.get("out_hidden_size")) != hidden:
        raise ConfigError(
            f"vision_config.out_hidden_size={out} in config.json is not the hidden_size={hidden} of the language model"
        )
    if vision.get("deepstack_visual_indexes") != []:
        raise ConfigError(
            "vision_config.deepstack_visual_indexes in config.json must be [], as published: SGLang assumes other "
            "mergers where it is missing, transformers none"
        )
    width, inner, depth, channels, patch, frames, merged, positions = _sizes(vision, QWEN)
    root, wide = "model.visual", width * merged**2
    shapes = _with_bias(f"{root}.patch_embed.proj", width, channels, frames, patch, patch)
    shapes[f"{root}.pos_embed.weight"] = (positions, width)
    for block in range(depth):
        at = f"{root}.blocks.{block}"
        shapes |= _with_bias(f"{at}.attn.qkv", 3 * width, width) | _with_bias(f"{at}.attn.proj", width, width)
        shapes |= _with_bias(f"{at}.mlp.linear_fc1", inner, width) | _with_bias(f"{at}.mlp.linear_fc2", width, inner)
        shapes |= _with_bias(f"{at}.norm1", width) | _with_bias(f"{at}.norm2", width)
    shapes |= _with_bias(f"{root}.merger.linear_fc1", wide, wide) | _with_bias(
        f"{root}.merger.linear_fc2", hidden, wide
    )
    return shapes | _with_bias(f"{root}.merger.norm", width)


# transformers has no values for the last three that fit together; published files state all.
LLAMA4 = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 7680,
}


def llama4(vision: Mapping[str, Any], hidden: int) -> Shapes:
    """Llama 4's tower, its adapter and the projector behind it. Raises ConfigError for sizes that do not fit."""
    width, inner, layers, channels, image, patch, entry, middle, out = _sizes(vision, LLAMA4)
    if not entry == middle == out:
        raise ConfigError(
            f"vision_config.projector_input_dim={entry}, projector_output_dim={middle} and vision_output_dim={out} in "
            f"config.json must be equal: the adapter and the projector after it have matrices of one width"
        )
    if vision.get("multi_modal_projector_bias"):
        raise ConfigError(
            "vision_config.multi_modal_projector_bias in config.json must be false: SGLang's adapter would have "
            "biases, transformers' has none"
        )
    root = "vision_model"
    shapes: Shapes = {
        f"{root}.class_embedding": (width,),
        f"{root}.positional_embedding_vlm": ((image // patch) ** 2 + 1, width),
        f"{root}.patch_embedding.linear.weight": (width, channels * patch**2),
    }
    for layer in range(layers):
        at = f"{root}.model.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes |= _with_bias(f"{at}.self_attn.{projection}", width, width)
        shapes |= _with_bias(f"{at}.mlp.fc1", inner, width) | _with_bias(f"{at}.mlp.fc2", width, inner)
        shapes |= _with_bias(f"{at}.input_layernorm", width) | _with_bias(f"{at}.post_attention_layernorm", width)
    shapes |= _with_bias(f"{root}.layernorm_pre", width) | _with_bias(f"{root}.layernorm_post", width)
    return shapes | {
        f"{root}.vision_adapter.mlp.fc1.weight": (middle, inner),
        f"{root}.vision_adapter.mlp.fc2.weight": (out, middle),
        "multi_modal_projector.linear_1.weight": (hidden, out),
    }


def _sizes(vision: Mapping[str, Any], defaults: Mapping[str, int]) -> list[int]:
    """The values of ``defaults``' keys, in their order."""
    sizes = {**defaults, **{key: vision[key] for key in defaults if vision.get(key) is not None}}
    return [whole_number(sizes, key, "vision_config.") for key in sizes]


def _with_bias(module: str, *shape: int) -> Shapes:
    return {f"{module}.weight": shape, f"{module}.bias": shape[:1]}
