"""The model families as data: which Hugging Face tensors make up which Megatron parameter, and how it is split.

One table per family serves every direction: loading, export, the sync plan. A pattern's ``{layer}`` is the global layer
on the Hugging Face side and the stage's own layer on the Megatron side. Transformer Engine's fused layers carry two
norms under other names than the local layers; that is the only difference between the two flavours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megasync.errors import ConfigError


class Split(Enum):
    """How tensor parallelism cuts a Megatron parameter that is made of one or more Hugging Face tensors."""

    REPLICATED = "every rank holds the whole"
    ROW = "input features (columns of the matrix) are cut"
    GATED = "gate and up, each cut by rows; a rank holds its gate rows, then its up rows"
    QKV = "rows run q..q k v per key-value group; the whole is cut contiguously"
    VOCAB = "rows are cut after padding the vocabulary"


@dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor: name pattern, and shape as names of `Sizes` fields."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, the Hugging Face tensors inside it (in fused order), and its split."""

    split: Split
    tensors: tuple[Tensor, ...]
    local: str
    te: str | None = None

    def param(self, spec: str) -> str:
        return self.te if spec == "te" and self.te else self.local


@dataclass(frozen=True)
class Family:
    """A model type. ``fixed`` names options whose other values change the parameters, and the only value supported."""

    embedding: Rule
    layer: tuple[Rule, ...]
    final: Rule
    head: Rule
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model, read from its config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.groups * self.head_dim

    def shape(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in names)


def _norm(hf: str, local: str, te: str | None = None, size: str = "hidden") -> Rule:
    return Rule(Split.REPLICATED, (Tensor(hf, (size,)),), local, te)


def _qkv(kind: str, *columns: str) -> Rule:
    rows = {"q": "q_rows", "k": "kv_rows", "v": "kv_rows"}
    tensors = (Tensor(f"model.layers.{{layer}}.self_attn.{x}_proj.{kind}", (rows[x], *columns)) for x in "qkv")
    return Rule(Split.QKV, tuple(tensors), f"decoder.layers.{{layer}}.self_attention.linear_qkv.{kind}")


_EMBEDDING = Rule(
    Split.VOCAB, (Tensor("model.embed_tokens.weight", ("vocab", "hidden")),), "embedding.word_embeddings.weight"
)
_FINAL = _norm("model.norm.weight", "decoder.final_layernorm.weight")
_HEAD = Rule(Split.VOCAB, (Tensor("lm_head.weight", ("vocab", "hidden")),), "output_layer.weight")

_INPUT_NORM = _norm(
    "model.layers.{layer}.input_layernorm.weight",
    "decoder.layers.{layer}.input_layernorm.weight",
    "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
)
_QKV_WEIGHT = _qkv("weight", "hidden")
_QKV_BIAS = _qkv("bias")
_QK_NORMS = tuple(
    _norm(
        f"model.layers.{{layer}}.self_attn.{x}_norm.weight",
        f"decoder.layers.{{layer}}.self_attention.{x}_layernorm.weight",
        size="head_dim",
    )
    for x in "qk"
)
_OUTPUT = Rule(
    Split.ROW,
    (Tensor("model.layers.{layer}.self_attn.o_proj.weight", ("hidden", "q_rows")),),
    "decoder.layers.{layer}.self_attention.linear_proj.weight",
)
_MLP = (
    _norm(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
    ),
    Rule(
        Split.GATED,
        (
            Tensor("model.layers.{layer}.mlp.gate_proj.weight", ("intermediate", "hidden")),
            Tensor("model.layers.{layer}.mlp.up_proj.weight", ("intermediate", "hidden")),
        ),
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
    ),
    Rule(
        Split.ROW,
        (Tensor("model.layers.{layer}.mlp.down_proj.weight", ("hidden", "intermediate")),),
        "decoder.layers.{layer}.mlp.linear_fc2.weight",
    ),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        embedding=_EMBEDDING,
        layer=(_INPUT_NORM, _QKV_WEIGHT, _OUTPUT, *_MLP),
        final=_FINAL,
        head=_HEAD,
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Family(
        embedding=_EMBEDDING,
        layer=(_INPUT_NORM, _QKV_WEIGHT, _QKV_BIAS, _OUTPUT, *_MLP),
        final=_FINAL,
        head=_HEAD,
    ),
    "qwen3": Family(
        embedding=_EMBEDDING,
        layer=(_INPUT_NORM, _QKV_WEIGHT, *_QK_NORMS, _OUTPUT, *_MLP),
        final=_FINAL,
        head=_HEAD,
        fixed={"attention_bias": False},
        defaults={"head_dim": 128},
    ),
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The table of a config.json's ``model_type``.

    Raises:
        ConfigError: no table for that type, or an option that the table does not cover.
    """
    kind = hf_config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"model_type {kind!r} in config.json is not supported; supported are {', '.join(FAMILIES)}")
    for key, value in FAMILIES[kind].fixed.items():
        if hf_config.get(key, value) != value:
            raise ConfigError(f"{key}={hf_config[key]} in config.json is not supported for {kind}; only {value} is")
    return FAMILIES[kind]


def sizes_of(hf_config: Mapping[str, Any]) -> Sizes:
    """Dimensions of the model in a config.json.

    Raises:
        ConfigError: a size is missing.
    """
    config = {**family_of(hf_config).defaults, **{key: value for key, value in hf_config.items() if value is not None}}
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Sizes(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            groups=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim", hidden // heads),
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}") from None
