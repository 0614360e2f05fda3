"""Refuses reward models, auxiliary models and teachers that could not start, and reward models that no reward uses.

A part of `check`. It also checks each model's folder: that the model is of the configured kind and can be split as
configured.
"""

from __future__ import annotations

import math
import re
import string
from pathlib import Path
from typing import Any

from megasync.config.limits import refuse_unused
from megasync.config.pools import frozen_models
from megasync.config.schema import Config, FrozenModelConfig, RewardModelConfig
from megasync.config.server_args import OF_FROZEN_MODELS, check_server_args
from megasync.errors import ConfigError
from megasync.layout.families import FAMILIES
from megasync.preflight.check_weights import check_frozen_weights
from megasync.serving.frozen_folder import read_frozen_model
from megasync.trainer.architecture import chunks_of

# Classes for which SGLang returns scores of a text instead of tokens.
CLASSIFIERS = (
    *("LlamaForSequenceClassification", "LlamaForSequenceClassificationWithNormal_Weights"),
    *("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification", "Gemma2ForSequenceClassification"),
    *("Qwen2ForRewardModel", "Qwen3ForRewardModel", "InternLM2ForRewardModel"),
)
# Sizes that the config.json of every decoder states.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
# Keys that apply to one kind of model, or one way to read its answer, only.
_OF_NUMBER = ("pattern", "low", "high", "max_new_tokens", "temperature")
_OF_YES_NO = ("yes_token", "no_token")


def check_frozen_models(config: Config, planning: bool) -> None:
    """Raises ConfigError for the first contradiction. With `planning` the folders may be missing."""
    asked = {reward.model: name for name, reward in config.rollout.rewards.items() if reward.model is not None}
    for model, reward in asked.items():
        if model not in config.reward_models:
            known = ", ".join(config.reward_models) or "none"
            raise ConfigError(f"rollout.rewards.{reward}.model={model!r} is not among reward_models ({known})")
    _check_sources(config)
    for key, model in frozen_models(config).items():
        name = key.partition(".")[2]
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"{key}: a model's name may have letters, digits, '_' and '-' only")
        if isinstance(model, RewardModelConfig):
            if name not in asked:
                raise ConfigError(
                    f"{key} would be started but never used; name it in a reward, such as rollout.rewards.{name}.model="
                    f"{name}, or remove it"
                )
            _check_reading(key, model)
        check_server_args(key, model.server_args, OF_FROZEN_MODELS)
        if model.pool == "rollout":
            _check_shared(key, model, config)
        if not planning or Path(model.path).expanduser().is_dir():
            check_frozen_folder(key, model)
    _check_memory(config)


def _check_reading(key: str, model: RewardModelConfig) -> None:
    """Checks the keys that define the model's input and how its score is read."""
    unused = {
        "classifier": ("read", *_OF_NUMBER, *_OF_YES_NO),
        "number": ("label", *_OF_YES_NO),
        "yes_no": ("label", *_OF_NUMBER),
    }["classifier" if model.kind == "classifier" else model.read]
    method = f"kind={model.kind}" if model.kind == "classifier" else f"read={model.read}"
    refuse_unused(model, key, unused, f"with {key}.{method}; change that")
    if model.template is not None:
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(model.template) if name is not None}
        except ValueError as error:
            raise ConfigError(
                f"{key}.template={model.template!r} is not a valid format string ({error}); write {{{{ and }}}} for "
                f"literal braces"
            ) from None
        if "completion" not in names:
            raise ConfigError(f"{key}.template={model.template!r} does not contain the response; add {{completion}}")
    if model.system and model.format == "raw":
        raise ConfigError(f"{key}.system is a chat message, but {key}.format=raw; put the text into {key}.template")
    if model.kind == "classifier":
        return
    if model.read == "yes_no":
        if model.yes_token == model.no_token:
            raise ConfigError(f"{key}.yes_token and {key}.no_token are both {model.yes_token!r}; they must differ")
        return
    try:
        groups = re.compile(model.pattern or "").groups
    except re.error as error:
        raise ConfigError(f"{key}.pattern={model.pattern!r} is not a regular expression: {error}") from None
    if groups > 1:
        raise ConfigError(f"{key}.pattern={model.pattern!r} has {groups} groups, and the number must be in the first")
    if not (math.isfinite(model.low) and math.isfinite(model.high) and model.low < model.high):
        raise ConfigError(f"{key}.low={model.low:g} must be below {key}.high={model.high:g}")


def _check_shared(key: str, model: FrozenModelConfig, config: Config) -> None:
    """Checks that each server fits on the devices of the rollout server that it shares them with."""
    rollout = config.rollout
    for name in ("servers", "tensor_parallel"):
        own, limit = getattr(model, name), getattr(rollout, name)
        if own > limit:
            raise ConfigError(
                f"{key}.{name}={own} with {key}.pool=rollout exceeds rollout.{name}={limit}, whose devices it shares; "
                f"lower it, or set {key}.pool=own"
            )


def _check_memory(config: Config) -> None:
    shared = {key: model for key, model in frozen_models(config).items() if model.pool == "rollout"}
    total = config.rollout.mem_fraction + sum(model.mem_fraction for model in shared.values())
    if shared and total >= 1:
        parts = " + ".join(f"{key}.mem_fraction={m.mem_fraction:g}" for key, m in shared.items())
        raise ConfigError(
            f"rollout.mem_fraction={config.rollout.mem_fraction:g} + {parts} are shares of the same devices and sum to "
            f"{total:g}; they must sum to less than 1"
        )


def _check_sources(config: Config) -> None:
    """Each row has at most one teacher."""
    taught: dict[str, str] = {}
    for name, teacher in config.teachers.items():
        for source in teacher.sources or [""]:
            if (other := taught.setdefault(source, name)) != name:
                what = f"rows of data_source={source}" if source else "all other rows (sources is empty)"
                raise ConfigError(
                    f"teachers.{other} and teachers.{name} both teach {what}; give each of them other "
                    f"teachers.<name>.sources"
                )


def check_frozen_folder(key: str, model: FrozenModelConfig) -> int:
    """Raises ConfigError unless the folder holds a model of the configured kind; returns how many tensors it has."""
    folder = Path(model.path).expanduser()
    values = read_frozen_model(key, model)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}.path={model.path!r} has a config.json but no *.safetensors weights; add them")
    architectures = values.get("architectures") or []
    classes = ", ".join(architectures) or "no named class"
    classifies = any(name in CLASSIFIERS for name in architectures)
    scores = isinstance(model, RewardModelConfig)
    if scores and model.kind == "classifier":
        _check_classifier(key, model, values, classes, classifies)
    elif not any(name.endswith("ForCausalLM") for name in architectures):
        said = f"{key}.kind=generative, but {key}" if scores else key
        raise ConfigError(
            f"{said}.path={model.path!r} contains {classes}, which generates no text"
            + ("; set kind=classifier" if classifies and scores else "")
        )
    if missing := [name for name in _SIZES if not isinstance(values.get(name), int)]:
        raise ConfigError(f"{key}.path={model.path!r} has a config.json without {', '.join(missing)}; it is incomplete")
    heads, tensor = values["num_attention_heads"], model.tensor_parallel
    if heads % tensor:
        raise ConfigError(f"{key}.tensor_parallel={tensor} does not divide the model's num_attention_heads={heads}")
    limit = values["max_position_embeddings"]
    if (model.context_length or 0) > limit:
        raise ConfigError(f"{key}.context_length={model.context_length} exceeds the model's {limit}; lower it")
    chunks = chunks_of(values) if values.get("model_type") in FAMILIES else None
    if chunks and (model.context_length or limit) > chunks.size:
        raise ConfigError(
            f"{key}.context_length={model.context_length} allows more than attention_chunk_size={chunks.size} tokens, "
            f"but servers of {values['model_type']} do not end attention at a chunk; set it to at most {chunks.size}"
        )
    return check_frozen_weights(key, folder, values, generates=not (scores and model.kind == "classifier"))


def _check_classifier(
    key: str, model: RewardModelConfig, values: dict[str, Any], classes: str, classifies: bool
) -> None:
    if not classifies:
        raise ConfigError(
            f"{key}.kind=classifier, but {key}.path={model.path!r} contains {classes}; SGLang classifies with "
            f"{', '.join(CLASSIFIERS)}. Set kind=generative for a model that generates text"
        )
    default = 1 if "RewardModel" in str(values["architectures"]) else 2
    labels = len(values.get("id2label") or {}) or values.get("num_labels", default)
    if model.label >= labels:
        raise ConfigError(f"{key}.label={model.label} exceeds the {labels} output(s) of {key}.path={model.path!r}")
