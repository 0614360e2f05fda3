"""The dimensions of a model, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from megasync.errors import ConfigError

# Spellings of the number of experts; a family may use several.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Kinds of layers in ``layer_types``.
DELTA_LAYER, FULL_LAYER = "linear_attention", "full_attention"
# Of a gated delta net, in the order of the fields of `DeltaHeads`.
DELTA_KEYS = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def whole_number(config: Mapping[str, Any], key: str, section: str = "") -> int:
    """A value of a config.json, or of its ``section``. Raises ConfigError unless it is a whole number from 1."""
    if type(config[key]) is not int or config[key] < 1:
        raise ConfigError(f"{section}{key}={config[key]!r} in config.json must be a whole number from 1")
    return config[key]


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a gated delta net, and its convolution."""

    # Key heads, and as many query heads. Each is shared by a `group` of value heads.
    keys: int
    # Channels of a key head.
    key_dim: int
    # Value heads in all.
    values: int
    # Channels of a value head.
    value_dim: int
    # The length of the convolution.
    taps: int

    def over(self, ranks: int) -> DeltaHeads:
        """The heads of each of ``ranks`` ranks."""
        return replace(self, keys=self.keys // ranks, values=self.values // ranks)

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.values // self.keys

    @property
    def group_rows(self) -> int:
        """Value channels of a key head."""
        return self.group * self.value_dim

    @property
    def key_rows(self) -> int:
        return self.keys * self.key_dim

    @property
    def value_rows(self) -> int:
        return self.values * self.value_dim

    @property
    def conv_rows(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_rows + self.value_rows

    @property
    def qkvz_rows(self) -> int:
        """Queries, keys, values and gates of the output."""
        return self.conv_rows + self.value_rows

    @property
    def in_rows(self) -> int:
        # A rate and a step of the decay for each value head.
        return self.qkvz_rows + 2 * self.values

    @property
    def sections(self) -> tuple[int, int, int, int]:
        """The parts of `in_rows`: the channels that are convolved, gates, rates and steps."""
        return self.conv_rows, self.value_rows, self.values, self.values


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    # The experts of a layer that process each token.
    topk: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    # The global layers with experts.
    sparse_layers: frozenset[int] = frozenset()
    # Latent attention: the widths of the latents of queries (0: none) and of keys and values, the rotated channels
    # among the `head_dim` of a head, and the channels of a head's values.
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    # The heads of a gated delta net, and the global layers with one.
    delta: DeltaHeads | None = None
    delta_layers: frozenset[int] = frozenset()

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.groups * self.head_dim

    @property
    def kv_a_rows(self) -> int:
        """The latent of keys and values, and the rotated key that all heads share."""
        return self.kv_lora + self.rope_dim

    @property
    def kv_b_rows(self) -> int:
        """The rows made from the latent: of each head its own key channels, then its values."""
        return self.heads * (self.head_dim - self.rope_dim + self.value_dim)

    @property
    def value_rows(self) -> int:
        return self.heads * self.value_dim

    @property
    def active_width(self) -> float:
        """MLP channels that process a token in a layer, averaged over the layers."""
        sparse = self.topk * self.moe_intermediate + self.shared_intermediate
        share = len(self.sparse_layers) / self.layers
        return share * sparse + (1 - share) * self.intermediate

    @property
    def widths(self) -> dict[str, int]:
        """The inner widths that tensor parallelism splits, by their names in config.json; only those that occur."""
        dense = {"intermediate_size": self.intermediate} if len(self.sparse_layers) < self.layers else {}
        shared = {"shared_expert_intermediate_size": self.shared_intermediate} if self.shared_intermediate else {}
        latents = {"q_lora_rank": self.q_lora, "kv_lora_rank + qk_rope_head_dim": self.kv_a_rows}
        return dense | shared | {key: size for key, size in latents.items() if size}

    def shape(self, names: tuple[str | int, ...]) -> tuple[int, ...]:
        """The sizes that a table names: numbers, fields, or multiples of one (``2 * hidden``)."""
        pairs = (str(name).rpartition(" * ") for name in names)
        return tuple(int(factor or 1) * self._size(name) for factor, _, name in pairs)

    def _size(self, name: str) -> int:
        return int(name) if name.isdecimal() else attrgetter(name)(self)


def read_sizes(config: Mapping[str, Any], sparse: bool, latent: bool = False, delta: bool = False) -> Sizes:
    """Dimensions of the model in a config.json.

    Its family may have experts (``sparse``), latent attention (``latent``) or gated delta nets (``delta``). Raises
    ConfigError when a size is missing, or contradicts another.
    """
    try:
        heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
        attention = {
            "groups": config.get("num_key_value_heads", heads),
            "head_dim": config.get("head_dim", hidden // heads),
        }
        experts = _experts(config, layers) if sparse else {}
        dense = len(experts.get("sparse_layers", ())) < layers
        return Sizes(
            layers=layers,
            hidden=hidden,
            intermediate=config["intermediate_size"] if dense else config.get("intermediate_size", 0),
            heads=heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            **(_latents(config, heads) if latent else attention),
            **experts,
            **(_delta(config, layers) if delta else {}),
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}") from None


def _experts(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    key = next((key for key in EXPERT_KEYS if key in config), EXPERT_KEYS[0])
    return {
        "experts": config[key],
        "topk": config["num_experts_per_tok"],
        "moe_intermediate": config["moe_intermediate_size"],
        "shared_intermediate": _shared_intermediate(config),
        "sparse_layers": _sparse_layers(config, layers),
    }


def _shared_intermediate(config: Mapping[str, Any]) -> int:
    """Given as a width, or as a number of experts of the others' width."""
    if "n_shared_experts" in config:
        return config["n_shared_experts"] * config["moe_intermediate_size"]
    return config.get("shared_expert_intermediate_size", 0)


def _latents(config: Mapping[str, Any], heads: int) -> dict[str, int]:
    return {
        "groups": heads,
        "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "q_lora": config.get("q_lora_rank", 0),
        "kv_lora": config["kv_lora_rank"],
        "rope_dim": config["qk_rope_head_dim"],
        "value_dim": config["v_head_dim"],
    }


def _delta(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    heads = DeltaHeads(*(whole_number(config, key) for key in DELTA_KEYS))
    # Hugging Face assumes 4 where it is missing, SGLang fails.
    interval = whole_number(config, "full_attention_interval")
    if heads.values % heads.keys:
        raise ConfigError(
            f"linear_num_value_heads={heads.values} is not a multiple of linear_num_key_heads={heads.keys}"
        )
    regular = [FULL_LAYER if (layer + 1) % interval == 0 else DELTA_LAYER for layer in range(layers)]
    kinds = config.get("layer_types") or regular
    if kinds != regular:
        raise ConfigError(
            f"layer_types in config.json must have {FULL_LAYER!r} in every layer whose number is a multiple of "
            f"full_attention_interval={interval} and {DELTA_LAYER!r} in the others, as SGLang assumes; it has "
            f"{', '.join(map(str, kinds))}"
        )
    return {
        "delta": heads,
        "delta_layers": frozenset(layer for layer, kind in enumerate(kinds) if kind == DELTA_LAYER),
    }


def _sparse_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Every ``decoder_sparse_step``-th layer from ``first_k_dense_replace`` on, except those in ``mlp_only_layers``.

    Raises ConfigError if ``moe_layers`` (Llama 4) has others: Hugging Face reads it, and SGLang the step.
    """
    step, first = config.get("decoder_sparse_step", 1), config.get("first_k_dense_replace", 0)
    dense = config.get("mlp_only_layers", ())
    if type(step) is not int or step < 1:
        raise ConfigError(f"the step between layers with experts in config.json is {step!r}; it must be at least 1")
    sparse_layers = frozenset(layer for layer in range(first, layers) if (layer + 1) % step == 0 and layer not in dense)
    stated = config.get("moe_layers")
    if stated is not None and sorted(stated) != sorted(sparse_layers):
        raise ConfigError(
            f"moe_layers={stated} in config.json contradicts interleave_moe_layer_step={step}: Hugging Face reads the "
            f"first, SGLang the second; make them agree"
        )
    return sparse_layers
