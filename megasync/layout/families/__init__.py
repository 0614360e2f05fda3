"""The model families as data: which Hugging Face tensors make up which Megatron parameter, and how it is split.

One table per family serves every direction: loading, export, the sync plan. To add a family, add a table to the module
of its kind; docs/adding_a_model.md shows how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

from megasync.base.importing import quick_imports
from megasync.errors import ConfigError
from megasync.layout.families.delta_net import DELTA
from megasync.layout.families.dense import DENSE
from megasync.layout.families.experts import SPARSE
from megasync.layout.families.latent import LATENT
from megasync.layout.families.rules import Family, Rule, Split, Tensor
from megasync.layout.families.sizes import Sizes, read_sizes

__all__ = ["FAMILIES", "Family", "Rule", "Sizes", "Split", "Tensor", "family_of", "language_model", "sizes_of"]

FAMILIES: dict[str, Family] = {**DENSE, **SPARSE, **LATENT, **DELTA}


def language_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """The language model that a config.json describes: its ``text_config``, if it has a vision tower as well.

    The result keeps the ``model_type`` of the whole and ``vision_config``, and has the values that transformers assumes
    for missing keys, of which published files leave out most. Raises ConfigError for parts that contradict each other.
    """
    kind, text = values.get("model_type"), values.get("text_config")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or family.vision is None:
        return dict(values)
    for key in ("text_config", "vision_config"):
        if not isinstance(values.get(key), dict):
            raise ConfigError(f"{key}={values.get(key)!r} in config.json must be an object for model_type {kind!r}")
    stated = {key: value for key, value in cast(dict[str, Any], text).items() if value is not None}
    config = {**family.defaults, **values}
    # transformers and SGLang tie by the option of the whole model.
    tied = config.get("tie_word_embeddings", False)
    if (tied_text := stated.get("tie_word_embeddings", tied)) != tied:
        raise ConfigError(
            f"text_config.tie_word_embeddings={tied_text} in config.json contradicts "
            f"tie_word_embeddings={tied} of the whole model; make them equal"
        )
    del config["text_config"]
    return {**config, **stated, "model_type": kind}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The table of a config.json's ``model_type``, with the rules that its switches turn on.

    Raises ConfigError for a type without a table, and for an option that the table does not cover.
    """
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"model_type {kind!r} in config.json is not supported; supported are {', '.join(FAMILIES)}"
            f"{_nearest(hf_config)}"
        )
    family = FAMILIES[kind]
    config = {**family.defaults, **hf_config}
    for key, value in family.fixed.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{key}={config[key]} in config.json is not supported for {kind}; only {value} is")

    def held(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(rule for rule in rules if rule.holds(config))

    return replace(family, layer=held(family.layer), dense=held(family.dense), sparse=held(family.sparse))


def sizes_of(hf_config: Mapping[str, Any]) -> Sizes:
    """Dimensions of the model in a config.json. Raises ConfigError when a size is missing."""
    family = family_of(hf_config)
    stated = {key: value for key, value in hf_config.items() if value is not None}
    config = {**family.defaults, **stated}
    config |= {key: config[spelling] for key, spelling in family.spelling.items() if spelling in config}
    return read_sizes(config, bool(family.sparse), family.latent, bool(family.delta))


# The family that comes nearest to a model that no table covers

# Options that say nothing about parameters or about what a layer computes.
_INCIDENTAL = {
    *("torch_dtype", "auto_map", "pretraining_tp", "quantization_config", "text_config", "vision_config"),
    # How transformers spells them depends on its version.
    *("rope_theta", "rope_scaling", "rope_parameters"),
}
_SHOWN = 6


def _nearest(values: Mapping[str, Any]) -> str:
    """The end of a sentence about an unknown model_type: the family whose options are most like its config.json's.

    Empty if no family shares an option with it.
    """
    text = cast("Mapping[str, Any] | None", values.get("text_config"))
    known, common = _known_options()
    options = {*values, *(text if isinstance(text, Mapping) else ())} - common
    nearest = max(known, key=lambda kind: len(options & known[kind]) / len(options | known[kind]))
    if not options & known[nearest]:
        return ""
    other = sorted(options - known[nearest])
    more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
    if not other:
        return f"; the nearest is {nearest}, which has the same options: the two differ in code alone"
    return f"; the nearest is {nearest}, which has no {', '.join(other[:_SHOWN])}{more}"


@cache
def _known_options() -> tuple[dict[str, set[str]], set[str]]:
    """The options of each family that transformers knows, and those that are common to all or incidental."""
    with quick_imports():
        from transformers import CONFIG_MAPPING, PretrainedConfig

    common = {*PretrainedConfig().to_dict(), *_INCIDENTAL}
    present = (kind for kind in FAMILIES if kind in CONFIG_MAPPING)
    return {kind: {*CONFIG_MAPPING[kind]().to_dict()} - common for kind in present}, common
