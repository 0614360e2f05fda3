"""Finds and reads a model's config.json and checks that its folder is complete, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from megasync.base.files import read_object
from megasync.config.limits import path_problem
from megasync.config.schema import ModelConfig
from megasync.errors import ConfigError, raised_as
from megasync.layout.families import language_model
from megasync.layout.families.sizes import EXPERT_KEYS
from megasync.layout.storage import Storage, storage_of

# Names that `megasync fetch` can make: the error for a missing folder of one of these gives the command.
FETCHABLE = ("digits", "digits_moe", "smollm2")
# The dimensions in a config.json of the supported families.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
    *EXPERT_KEYS,
)
# Those that may be 0.
COUNTS = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"),
    *("n_shared_experts", "shared_expert_intermediate_size", "intermediate_size_mlp", "first_k_dense_replace"),
    *("n_group", "topk_group", "sliding_window", "attention_chunk_size", "num_labels"),
)
LARGEST_SIZE = 2**31 - 1
TYPED = (
    ("model_type", str, "text"),
    ("rms_norm_eps", float, "a fraction"),
    ("rope_scaling", dict, "an object"),
    ("rope_parameters", dict, "an object"),
)
# Lists, and what their entries are.
LISTS = (
    ("architectures", str, "texts"),
    ("layer_types", str, "texts"),
    ("mlp_only_layers", int, "whole numbers"),
    ("moe_layers", int, "whole numbers"),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The language model that a config.json describes, without how its weights are quantized.

    `path` is the file or the Hugging Face model folder that holds it. Raises ConfigError for a missing folder or file,
    a file that holds no JSON object, and weights that are quantized in another way than `storage` supports.
    """
    values, _ = _read(path)
    plain = {key: value for key, value in values.items() if key not in ("quantization_config", "compression_config")}
    with raised_as(ConfigError, str(path), of=ConfigError):
        language = language_model(plain)
        check_values(language)
        return language


def read_storage(path: str | Path) -> Storage | None:
    """How weights are quantized, None for unquantized ones. `path` and errors as of `read_hf_config`."""
    return _read(path)[1]


def _read(path: str | Path) -> tuple[dict[str, Any], Storage | None]:
    path = Path(path).expanduser()
    if not path.is_file():
        path = find_hf_config(ModelConfig(path=str(path)))
    try:
        values = read_object(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with raised_as(ConfigError, str(path), of=ConfigError):
        check_values(values)
        return values, storage_of(values)


def check_values(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for values of the wrong type in a config.json. The layout checks for missing ones."""
    for keys, least in ((SIZES, 1), (COUNTS, 0)):
        for key in keys:
            value = values.get(key)
            if value is not None and not (type(value) is int and least <= value <= LARGEST_SIZE):
                raise ConfigError(
                    f"{key}={value!r:.200} in config.json must be a whole number from {least} to {LARGEST_SIZE}"
                )
    for key, kind, words in TYPED:
        value = values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{key}={value!r:.200} in config.json must be {words}")
    for key, kind, words in LISTS:
        entries = cast("list[Any] | dict[str, Any] | None", values.get(key))
        if entries is not None and not (isinstance(entries, list) and all(type(entry) is kind for entry in entries)):
            raise ConfigError(f"{key}={entries!r:.200} in config.json must be a list of {words}")


def end_tokens(path: str | Path) -> frozenset[int]:
    """The tokens that end a response according to a folder's config.json and generation_config.json.

    Raises ConfigError for a file that holds no JSON object, and for ids that are no whole numbers.
    """
    token_ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(path).expanduser() / name
        if not file.exists():
            continue
        try:
            values = read_object(file)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        text = cast("dict[str, Any] | None", values.get("text_config"))
        inner = text.get("eos_token_id") if isinstance(text, dict) else None
        ends = cast("list[Any] | None", values.get("eos_token_id", inner))
        for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
            if type(end) is not int or end < 0:
                raise ConfigError(f"{file}: eos_token_id={ends!r:.200} must be a token id, a list of them, or null")
            token_ids.add(end)
    return frozenset(token_ids)


def check_model_folder(model: ModelConfig) -> None:
    """Raises ConfigError unless weights and a tokenizer lie beside the config.json."""
    folder = Path(model.path).expanduser()
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path={model.path!r} has a config.json but no *.safetensors weights; add them")
    if not has_tokenizer(folder):
        raise ConfigError(f"model.path={model.path!r} has no tokenizer files (tokenizer.json); add them")
    end_tokens(folder)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def find_hf_config(model: ModelConfig, *, planning: bool = False) -> Path:
    """The path of a model's config.json. With `planning`, `model.config` replaces it while the folder is missing.

    Raises ConfigError for a missing folder or file.
    """
    folder = Path(model.path).expanduser()
    if planning and model.config is not None and not folder.is_dir():
        path = Path(model.config).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"model.config={model.config!r} is not a file; give the path of a Hugging Face config.json"
            )
        return path
    if not folder.is_dir():
        only = " (only `megasync plan` uses model.config)" if model.config is not None else ""
        fix = "download the model there, or set model.path to a Hugging Face model folder"
        if folder.name in FETCHABLE:
            fix = f"make it with `megasync fetch {folder.name}`"
        raise ConfigError(f"model.path={model.path!r} is not a folder on this machine{only}; {fix}")
    path = folder / "config.json"
    if (problem := path_problem(str(path))) is not None:
        raise ConfigError(f"{path} is not accessible: {problem}; give the folder to the user that runs this")
    if not path.is_file():
        raise ConfigError(
            f"model.path={model.path!r} has no config.json; give a Hugging Face model folder (config.json, "
            f"*.safetensors and tokenizer files)"
        )
    return path
