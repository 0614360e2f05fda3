"""Checks that the trainer implements a Hugging Face config.json. Imports neither torch nor Megatron.

The sizes and parameters of a model type are defined by the layout table (`layout.families`); this module checks what
its layers compute. Options that are not listed here do not change the computation of the supported types.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any, NamedTuple

from megasync.config.rules import View, check_rules, rules_of
from megasync.config.schema import ClusterConfig, Config, ModelConfig, TrainerConfig
from megasync.config.schema.rollout import PIPELINED, UNTIED
from megasync.errors import ConfigError
from megasync.layout.families import family_of
from megasync.layout.families.sizes import whole_number
from megasync.layout.layout import Layout

# Options that change the computation, and the only implemented value, which is also the default.
FIXED = {"hidden_act": "silu", "use_sliding_window": False}
# Kinds of attention layers in ``layer_types``.
WINDOWED, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
# Of as many layers the last attends to all tokens, in a family whose other layers attend in chunks.
CHUNK_PATTERN = 4
# Kinds of rotary scaling, and the constants that each requires.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def check_architecture(hf_config: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that is not implemented."""
    for key, value in FIXED.items():
        if hf_config.get(key, value) != value:
            raise ConfigError(f"{key}={hf_config[key]!r} in config.json is not supported; only {value!r} is")
    if hf_config.get("rms_norm_eps") is None:
        raise ConfigError("config.json has no 'rms_norm_eps'")
    rope_parameters(hf_config)
    window_options(hf_config)
    chunks_of(hf_config)
    family = family_of(hf_config)
    if family.local_rotary:
        rope_parameters(hf_config, windowed=True)
    limit = {**family.defaults, **hf_config}.get("swiglu_limit")
    if family.clamped and not (isinstance(limit, int | float) and limit > 0):
        raise ConfigError(f"swiglu_limit={limit!r} in config.json must be a number above 0")
    _check_routing(hf_config)


def _check_routing(hf_config: Mapping[str, Any]) -> None:
    """Raises ConfigError for sigmoid routing that Megatron computes differently from Hugging Face and SGLang."""
    family = family_of(hf_config)
    if not family.has_router_bias:
        return
    config = {**family.defaults, **hf_config}
    topk, chosen = config["num_experts_per_tok"], config["topk_group"]
    if topk < 2:
        raise ConfigError(
            f"num_experts_per_tok={topk} in config.json is not supported: Megatron does not normalise a single weight"
        )
    if chosen < config["n_group"] and topk // chosen != 2:
        raise ConfigError(
            f"num_experts_per_tok={topk} with topk_group={chosen} in config.json is not supported: Megatron ranks "
            f"groups of experts by their best {topk // chosen}, Hugging Face and SGLang by their best 2"
        )


def window_options(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` for layers with a sliding window; none if no layer has one.

    Raises ConfigError for other kinds of layers, and for a list that does not have one for each layer.
    """
    family = family_of(hf_config)
    if not family.windows:
        return {}
    config = {**family.defaults, **hf_config}
    # One full layer after each pattern - 1 layers with a window.
    layers, pattern = config["num_hidden_layers"], whole_number(config, "sliding_window_pattern")
    regular = [WINDOWED if (layer + 1) % pattern else FULL for layer in range(layers)]
    kinds: list[str] = config.get("layer_types") or regular
    if len(kinds) != layers or not set(kinds) <= {WINDOWED, FULL}:
        raise ConfigError(
            f"layer_types in config.json must have {WINDOWED!r} or {FULL!r} for each of num_hidden_layers={layers} "
            f"layers; it has {len(kinds)}: {', '.join(sorted(set(map(str, kinds))))}"
        )
    if WINDOWED not in kinds:
        return {}
    # Megatron counts the tokens before the query, config.json counts its own as well.
    before = whole_number(config, "sliding_window") - 1
    return {"window_size": (before, 0), "window_attn_skip_freq": [int(kind == WINDOWED) for kind in kinds]}


class Chunks(NamedTuple):
    """Attention in chunks: a token attends to itself and the tokens before it in its chunk of the sequence."""

    # The number of positions of a chunk.
    size: int
    # The layers that attend to all tokens instead, and rotate nothing.
    full: frozenset[int]
    # The other layers normalise queries and keys.
    normed: bool
    # Full layers multiply queries by `1 + scale * log(1 + floor((position + 1) / positions))` if this is (scale,
    # positions) (https://arxiv.org/abs/2501.19399).
    temperature: tuple[float, int] | None


def chunks_of(hf_config: Mapping[str, Any]) -> Chunks | None:
    """How layers attend in chunks; None if the family has no such layers.

    Raises ConfigError for another pattern of layers than SGLang's, and for numbers that are none.
    """
    family = family_of(hf_config)
    if not family.chunks:
        return None
    config = {**family.defaults, **hf_config}
    layers = range(config["num_hidden_layers"])
    full = frozenset(layer for layer in layers if (layer + 1) % CHUNK_PATTERN == 0)
    regular = {
        "no_rope_layers": [int(layer not in full) for layer in layers],
        "layer_types": [FULL if layer in full else CHUNKED for layer in layers],
    }
    for key, values in regular.items():
        if config.get(key) and config[key] != values:
            raise ConfigError(
                f"{key}={config[key]} in config.json is not supported: SGLang rotates nothing, and attends to all "
                f"tokens, in every {CHUNK_PATTERN}th layer and in no other"
            )
    interval = config.get("no_rope_layer_interval", CHUNK_PATTERN)
    if interval != CHUNK_PATTERN and not config.get("no_rope_layers"):
        raise ConfigError(
            f"no_rope_layer_interval={interval} in config.json is not supported: SGLang assumes {CHUNK_PATTERN}"
        )
    size, steps = (whole_number(config, key) for key in ("attention_chunk_size", "floor_scale"))
    tuned = config["attn_temperature_tuning"]
    return Chunks(
        size=size,
        full=full,
        normed=bool(config["use_qk_norm"]),
        temperature=(config["attn_scale"], steps) if tuned else None,
    )


def rope_parameters(hf_config: Mapping[str, Any], *, windowed: bool = False) -> dict[str, Any]:
    """The rope options of a config.json, in the old form (``rope_theta``, ``rope_scaling``) or ``rope_parameters``.

    ``windowed``: those of layers with a sliding window, in a family where they differ.

    Raises ConfigError if the base frequency is missing, or the scaling is not implemented or lacks a constant.
    """
    family = family_of(hf_config)
    hf_config = {**family.defaults, **hf_config}
    new = hf_config.get("rope_parameters") or {}
    if family.local_rotary:
        new = new.get(WINDOWED if windowed else FULL) or {}
    if windowed:
        old = {"rope_theta": hf_config.get("rope_local_base_freq")}
    else:
        old = {"rope_theta": hf_config.get("rope_theta"), **(hf_config.get("rope_scaling") or {})}
    rope = {**old, **new}
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    # SGLang does not scale the angles of layers with a window.
    kinds = ("default",) if windowed else family.rope_types
    if kind not in kinds:
        supported = f"supported for {hf_config['model_type']} are {', '.join(kinds)}"
        raise ConfigError(f"rope_type {kind!r} in config.json is not supported; {supported}")
    if rope["rope_theta"] is None:
        raise ConfigError("config.json has neither rope_parameters.rope_theta nor rope_theta")
    missing = [key for key in ROPE_TYPES[kind] if rope.get(key) is None]
    if missing:
        raise ConfigError(f"rope_type {kind!r} in config.json needs {', '.join(missing)}")
    rope["partial_rotary_factor"] = partial = _rotated_share(rope, hf_config, family.partial_rotary)
    if partial != 1.0 and not family.partial_rotary:
        raise ConfigError(f"partial_rotary_factor={partial} in config.json is not supported; only 1.0 is")
    return rope


def _rotated_share(rope: Mapping[str, Any], config: Mapping[str, Any], key: str | None) -> float:
    """Share of a head's channels that are rotated. Raises ConfigError if two options contradict each other."""
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if key != "rotary_dim":
        return 1.0 if partial is None else partial
    share = config.get("rotary_dim", config["head_dim"]) / config["head_dim"]
    if partial not in (None, share):
        raise ConfigError(
            f"partial_rotary_factor={partial} in config.json contradicts rotary_dim={config.get('rotary_dim')} with "
            f"head_dim={config['head_dim']}: Hugging Face reads the first, SGLang the second; make them agree"
        )
    return share


# Tokens of a microbatch in FP8 are a multiple of these: ranks that gather tokens of a sequence send whole blocks.
FP8_TOKENS = {"tensorwise": 16, "blockwise": 128}


def token_multiple(trainer: TrainerConfig) -> int:
    """A multiple of this many tokens makes a microbatch of a context-parallel rank.

    Sequence parallelism splits it, FP8 takes whole blocks.
    """
    return FP8_TOKENS.get(trainer.fp8 or "", 1) * (trainer.tensor_parallel if trainer.sequence_parallel else 1)


def full_microbatch(trainer: TrainerConfig) -> int:
    """Tokens of a full microbatch on all its context-parallel ranks. With `trainer.pad_microbatches` that of each."""
    context = trainer.context_parallel
    tokens = trainer.tokens_per_microbatch * context
    if not trainer.pad_microbatches:
        return tokens
    return tokens + -tokens % lcm(2 * context if context > 1 else 1, context * token_multiple(trainer))


# Rows and columns of a matrix in FP8 are multiples of this; only the last block of a row or column may be smaller.
# Megatron fills the tokens of each expert up to it.
FP8_MULTIPLE = 16
# Matrices of layers that are no linear layers of Transformer Engine.
NEVER_FP8 = (".router.weight", ".gate_weight")


def model_facts(layout: Layout) -> dict[str, Any]:
    """The facts about a model, and about how trainer ranks split it, that the rules of keys (`config.rules`) read."""
    sizes, family, kind = layout.sizes, layout.family, layout.hf_config["model_type"]
    return {
        "model's type": kind,
        "model's layers": sizes.layers,
        "model's experts": sizes.experts,
        "model's shared experts": sizes.shared_intermediate,
        "model's dense layers": sizes.layers - len(sizes.sparse_layers),
        "model's latent attention": family.latent,
        "model's gated delta nets": sizes.delta is not None,
        "model's attention in chunks": bool(family.chunks),
        "model's windows and sinks": bool(family.windows),
        "model's rotated pairs of adjacent channels": family.interleaved_rotary,
        "model's max_position_embeddings": layout.hf_config.get("max_position_embeddings"),
        "model's linear_num_key_heads": sizes.delta.keys if sizes.delta else None,
        "model's num_attention_heads": sizes.heads,
        "model's num_key_value_heads": None if family.latent else sizes.groups,
        "model's pipeline in SGLang": kind in PIPELINED and not (sizes.tied and kind in UNTIED),
        "trainer's ranks of an expert layer": layout.topology.expert * layout.topology.expert_tensor_size,
    }


def check_trainer(layout: Layout, trainer: TrainerConfig, model: ModelConfig) -> None:
    """Raises ConfigError if ranks cannot train this model as configured: by the keys with a rule about the model."""
    device = "cpu" if layout.spec == "local" else "cuda"
    config = Config(trainer=trainer, model=model, cluster=ClusterConfig(device=device))
    facts, read = model_facts(layout), ("trainer", "model.dtype", "cluster.device")
    rules = rules_of(View(config), config.trainer, "trainer.")
    by_model = {key for key, rule in rules if not facts.keys().isdisjoint(rule.names(key))}
    check_rules(config, facts, within=by_model, readable=read)
    if trainer.fp8 is not None:
        _check_fp8(layout, trainer)


def _check_fp8(layout: Layout, trainer: TrainerConfig) -> None:
    """Raises ConfigError if a matrix on some rank has no whole blocks."""
    stages = (layout.topology.rank(0, 0, stage) for stage in range(layout.topology.pipeline))
    for rank in stages:
        for name, shape in layout.params(rank).items():
            if ".layers." not in name or len(shape) != 2 or name.endswith(NEVER_FP8):
                continue
            if any(size % FP8_MULTIPLE for size in shape):
                split = ("expert_tensor_parallel", layout.topology.expert_tensor_size)
                key, ranks = split if ".experts." in name else ("tensor_parallel", trainer.tensor_parallel)
                raise ConfigError(
                    f"trainer.fp8={trainer.fp8} needs multiples of {FP8_MULTIPLE}, but {name} is {shape[0]} x "
                    f"{shape[1]} on a rank with trainer.{key}={ranks}; lower that, or set fp8 to null"
                )
