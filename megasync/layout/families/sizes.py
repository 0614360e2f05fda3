"""The dimensions of a model, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megasync.errors import ConfigError

# Spellings of the number of experts; a family may use several.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Sizes:
    """A model's dimensions. ``sparse_layers`` are the global layers with experts, ``topk`` of which process each token.

    With latent attention ``q_lora`` (0: none) and ``kv_lora`` are the widths of the latents. Then ``rope_dim`` of a
    head's ``head_dim`` query and key channels are rotated, and its values have ``value_dim``.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    topk: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    sparse_layers: frozenset[int] = frozenset()
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    value_dim: int = 0

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
        """Of each head in turn: its own key channels, then its values."""
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

    @property
    def gate_up(self) -> int:
        """Rows of a dense layer's gate and up projections together."""
        return 2 * self.intermediate

    @property
    def moe_gate_up(self) -> int:
        """Rows of an expert's gate and up projections together."""
        return 2 * self.moe_intermediate

    def shape(self, names: tuple[str | int, ...]) -> tuple[int, ...]:
        return tuple(name if isinstance(name, int) else getattr(self, name) for name in names)


def read_sizes(config: Mapping[str, Any], sparse: bool, latent: bool = False) -> Sizes:
    """Dimensions of the model in a config.json whose family has experts (``sparse``) or latent attention (``latent``).

    Raises ConfigError when a size is missing.
    """
    try:
        heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
        attention = {
            "groups": config.get("num_key_value_heads", heads),
            "head_dim": config.get("head_dim", hidden // heads),
        }
        return Sizes(
            layers=layers,
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            **(_latents(config, heads) if latent else attention),
            **(_experts(config, layers) if sparse else {}),
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


def _sparse_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Every ``decoder_sparse_step``-th layer from ``first_k_dense_replace`` on, except those in ``mlp_only_layers``."""
    step, first = config.get("decoder_sparse_step", 1), config.get("first_k_dense_replace", 0)
    dense = config.get("mlp_only_layers", ())
    return frozenset(layer for layer in range(first, layers) if (layer + 1) % step == 0 and layer not in dense)
