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

    ``te`` is the name under Transformer Engine's layers where it differs. ``when`` names a switch in config.json; the
    rule holds only where that is true. ``dtype`` is what an export always stores, where that is not the model's own.
    """

    split: Split
    tensors: tuple[Tensor, ...]
    local: str
    te: str | None = None
    when: str | None = None
    dtype: str | None = None

    def param(self, spec: str) -> str:
        return self.te if spec == "te" and self.te else self.local

    @property
    def per_expert(self) -> bool:
        """Stands for one parameter of each expert, cut over the ranks that share an expert."""
        return "{expert}" in self.local


@dataclass(frozen=True)
class Family:
    """A model type.

    ``layer`` holds the rules of every layer, ``dense`` and ``sparse`` those that only layers without and with experts
    have. ``fixed`` names options whose other values change the parameters, and the only value supported; ``defaults``
    are the values of options that config.json leaves out. ``interleaved_rotary``: neighbouring channels are rotated
    together, not the halves of a head; ``partial_rotary``: config.json may leave a part of the channels unrotated.
    """

    embedding: Rule
    layer: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    final: Rule
    head: Rule
    sparse: tuple[Rule, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    interleaved_rotary: bool = False
    partial_rotary: bool = False
