"""What a family's table is made of: rules that say which Hugging Face tensors make up which Megatron parameter.

In a pattern, ``{layer}`` is the global layer on the Hugging Face side and the model chunk's own layer on the Megatron
side; in the same way ``{expert}`` is the global expert, and the expert's number on its rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Split(Enum):
    """How tensor parallelism cuts a Megatron parameter that is made of one or more Hugging Face tensors."""

    REPLICATED = "every rank holds the whole"
    ROW = "input features (columns of the matrix) are cut"
    COLUMN = "output features (rows of the matrix) are cut contiguously"
    GATED = "gate rows, then up rows, in two tensors or one; each half is cut, a rank holds its gate and its up rows"
    QKV = "rows run q..q k v per key-value group; the whole is cut contiguously"
    VOCAB = "rows are cut after padding the vocabulary"


@dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor: name pattern, and shape as numbers and names of `Sizes` fields."""

    name: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter, the Hugging Face tensors inside it (in fused order), and its split.

    ``te`` and ``te_split`` are the name and the split under Transformer Engine's layers where they differ. ``when`` and
    ``unless`` name switches in config.json; the rule holds only where those are true, and false. ``dtype`` is what an
    export always stores, where that is not the model's own. ``joined``: the engine fuses these tensors with those of the
    rule before, and must be given all of them together. ``all_tokens``: each tensor rank computes a replicated parameter's
    gradient from all tokens, under sequence parallelism too.
    """

    split: Split
    tensors: tuple[Tensor, ...]
    local: str
    te: str | None = None
    te_split: Split | None = None
    when: str | None = None
    unless: str | None = None
    dtype: str | None = None
    joined: bool = False
    all_tokens: bool = False

    def param(self, spec: str) -> str:
        return self.te if spec == "te" and self.te else self.local

    def cut(self, spec: str) -> Split:
        return self.te_split if spec == "te" and self.te_split else self.split

    def holds(self, config: Mapping[str, Any]) -> bool:
        wanted = self.when is None or config.get(self.when)
        return bool(wanted) and not (self.unless and config.get(self.unless))

    @property
    def per_expert(self) -> bool:
        """Stands for one parameter of each expert, cut over the ranks that share an expert."""
        return "{expert}" in self.local


@dataclass(frozen=True)
class Family:
    """A model type.

    ``layer`` holds the rules of every layer, ``dense`` and ``sparse`` those that only layers without and with experts
    have. ``fixed`` names options whose other values change the parameters, and the only value supported; ``defaults``
    are the values of options that config.json leaves out; ``exported`` are those that an export's config.json states
    whatever the source's says. ``interleaved_rotary``: neighbouring channels are rotated together, not the halves of a
    head; ``partial_rotary``: config.json may leave a part of the channels unrotated; ``rope_types``: the kinds of rotary
    scaling that it may name. ``latent``: queries, keys and values pass through latents.
    """

    embedding: Rule
    layer: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    final: Rule
    head: Rule
    sparse: tuple[Rule, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    exported: Mapping[str, Any] = field(default_factory=dict)
    interleaved_rotary: bool = False
    partial_rotary: bool = False
    rope_types: tuple[str, ...] = ("default", "llama3")
    latent: bool = False

    @property
    def has_router_bias(self) -> bool:
        """Experts are chosen by sigmoid scores and a bias, possibly within the best groups of experts only."""
        return any(rule.local.endswith(".expert_bias") for rule in self.sparse)
