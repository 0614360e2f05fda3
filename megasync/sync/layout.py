"""Megatron shards and Hugging Face tensors as rectangles of each other.

A `Piece` says: these rows and columns of that Hugging Face tensor are those rows and columns of that local parameter.
The pieces of a rank cover each element of each of its parameters exactly once, vocabulary padding excepted
(`Layout.pieces`); the pieces of `Layout.holders` cover each Hugging Face tensor exactly once. Loading, export and the
sync plan are loops over pieces and know nothing about families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from megasync.errors import ConfigError
from megasync.sync.families import Rule, Sizes, Split, family_of, sizes_of
from megasync.sync.topology import Topology

# Megatron pads vocabularies so that each tensor rank holds a multiple of this many rows.
VOCAB_MULTIPLE = 64


class Box(NamedTuple):
    """A rectangle: first row, rows, first column, columns. A vector of n elements is n rows of one column."""

    row: int
    rows: int
    col: int
    cols: int


class Piece(NamedTuple):
    """The same numbers at two places; both boxes have the same size."""

    hf_name: str
    hf_box: Box
    param: str
    param_box: Box


class Holder(NamedTuple):
    """A piece together with the tensor and pipeline coordinates of a rank that holds it."""

    tp: int
    pp: int
    piece: Piece


@dataclass(frozen=True)
class Placed:
    """A rule applied to one stage: the local parameter's name, and its Hugging Face tensors with their shapes.

    ``copy`` marks the last stage's copy of a tied embedding: loaded there, but exported and sent by the first stage.
    """

    split: Split
    param: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    copy: bool = False


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all ``tp`` ranks: the smallest multiple of 64 * tp that holds the vocabulary."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


class Layout:
    """The rectangles of one model on one topology.

    Args:
        hf_config: the model's config.json.
        topology: the trainer's ranks.
        spec: "local" or "te", the flavour of Megatron's layers (their parameter names differ).

    Raises:
        ConfigError: an unsupported model, or sizes that Megatron cannot split over this topology.
    """

    def __init__(self, hf_config: Mapping[str, Any], topology: Topology, spec: str = "local") -> None:
        if spec not in ("local", "te"):
            raise ConfigError(f"layer spec {spec!r} is unknown; it is 'local' or 'te'")
        self.hf_config = dict(hf_config)
        self.topology = topology
        self.spec = spec
        self.family = family_of(hf_config)
        self.sizes = sizes_of(hf_config)
        _check_divisible(self.sizes, topology.tensor)
        self.stages = topology.stage_layers(self.sizes.layers)

    @property
    def padded_vocab(self) -> int:
        return padded_vocab(self.sizes.vocab, self.topology.tensor)

    @cached_property
    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the Hugging Face checkpoint, in checkpoint order; no head when it is tied."""
        stages = range(self.topology.pipeline)
        placed = [item for stage in stages for item in self.placed(stage) if not item.copy]
        return {name: shape for item in placed for name, shape in item.tensors}

    def placed(self, pp: int) -> list[Placed]:
        """The parameters of one stage. Tensors of one entry are fused in Megatron and belong together on the wire."""
        last = self.topology.pipeline - 1
        items = [self._place(self.family.embedding)] if pp == 0 else []
        for local, layer in enumerate(self.stages[pp]):
            items += [self._place(rule, layer, local) for rule in self.family.layer]
        if pp == last:
            items.append(self._place(self.family.final))
            if not self.sizes.tied:
                items.append(self._place(self.family.head))
            elif last > 0:
                embedding = self._place(self.family.embedding)
                items.append(Placed(Split.VOCAB, self.family.head.param(self.spec), embedding.tensors, copy=True))
        return items

    def _place(self, rule: Rule, layer: int = 0, local: int = 0) -> Placed:
        tensors = tuple((t.name.format(layer=layer), self.sizes.shape(t.shape)) for t in rule.tensors)
        return Placed(rule.split, rule.param(self.spec).format(layer=local), tensors)

    def params(self, tp: int, pp: int) -> dict[str, tuple[int, ...]]:
        """Local shape of each parameter on a rank, under the names of ``GPTModel.named_parameters()``."""
        return {item.param: self._local_shape(item) for item in self.placed(pp)}

    def _local_shape(self, item: Placed) -> tuple[int, ...]:
        parts = self.topology.tensor
        first = item.tensors[0][1]
        rows = sum(shape[0] for _, shape in item.tensors)
        match item.split:
            case Split.REPLICATED:
                return first
            case Split.ROW:
                return (rows, first[1] // parts)
            case Split.VOCAB:
                return (self.padded_vocab // parts, *first[1:])
            case Split.GATED | Split.QKV:
                return (rows // parts, *first[1:])

    def pieces(self, tp: int, pp: int) -> list[Piece]:
        """Every rectangle of a rank: all of each parameter's elements once, but for vocabulary padding."""
        return [piece for item in self.placed(pp) for piece in self._pieces(item, tp)]

    def _pieces(self, item: Placed, tp: int) -> Iterator[Piece]:
        for index, hf, local in self._rectangles(item, tp):
            yield Piece(item.tensors[index][0], hf, item.param, local)

    def _rectangles(self, item: Placed, tp: int) -> Iterator[tuple[int, Box, Box]]:
        """(index of the Hugging Face tensor, its box, the local box) of one parameter on one tensor rank."""
        parts = self.topology.tensor
        shape = item.tensors[0][1]
        rows, cols = shape[0], (*shape, 1)[1]
        match item.split:
            case Split.REPLICATED:
                yield 0, Box(0, rows, 0, cols), Box(0, rows, 0, cols)
            case Split.ROW:
                share = cols // parts
                yield 0, Box(0, rows, tp * share, share), Box(0, rows, 0, share)
            case Split.VOCAB:
                share = self.padded_vocab // parts
                held = min(share, rows - tp * share)
                if held > 0:
                    yield 0, Box(tp * share, held, 0, cols), Box(0, held, 0, cols)
            case Split.GATED:
                share = rows // parts
                for index in range(2):
                    yield index, Box(tp * share, share, 0, cols), Box(index * share, share, 0, cols)
            case Split.QKV:
                share = self._local_shape(item)[0]
                for index, hf_row, local_row, count in _qkv_rows(self.sizes, tp * share, share):
                    yield index, Box(hf_row, count, 0, cols), Box(local_row, count, 0, cols)

    @cached_property
    def holders(self) -> dict[str, tuple[Holder, ...]]:
        """For each Hugging Face tensor, the pieces that cover it exactly once and who holds them.

        Replicated tensors are taken from tensor rank 0, tied embeddings from the first stage.
        """
        found: dict[str, list[Holder]] = {name: [] for name in self.hf_tensors}
        for pp in range(self.topology.pipeline):
            for item in self.placed(pp):
                if item.copy:
                    continue
                ranks = 1 if item.split is Split.REPLICATED else self.topology.tensor
                for tp in range(ranks):
                    for piece in self._pieces(item, tp):
                        found[piece.hf_name].append(Holder(tp, pp, piece))
        return {name: tuple(holders) for name, holders in found.items()}


@lru_cache(maxsize=64)
def _qkv_rows(sizes: Sizes, start: int, count: int) -> tuple[tuple[int, int, int, int], ...]:
    """Rows ``start .. start + count`` of the fused q..q k v parameter: (tensor, its row, local row, rows) each.

    The cut is contiguous whatever the number of groups, so with fewer groups than tensor ranks it falls inside a group:
    Megatron gathers the projection's output there and picks each rank's heads from it.
    """
    per_group = sizes.heads // sizes.groups * sizes.head_dim
    lengths = (per_group, sizes.head_dim, sizes.head_dim)
    found = []
    fused = 0
    for group in range(sizes.groups):
        for index, length in enumerate(lengths):
            begin, end = max(fused, start), min(fused + length, start + count)
            if begin < end:
                found.append((index, group * length + begin - fused, begin - start, end - begin))
            fused += length
    return tuple(found)


def _check_divisible(sizes: Sizes, tensor: int) -> None:
    """Refuses what Megatron's own layers would refuse, naming both sides.

    Raises:
        ConfigError: heads, groups or widths that do not divide.
    """
    if sizes.heads % sizes.groups:
        raise ConfigError(f"num_attention_heads={sizes.heads} is no multiple of num_key_value_heads={sizes.groups}")
    for key, size in (("num_attention_heads", sizes.heads), ("intermediate_size", sizes.intermediate)):
        if size % tensor:
            raise ConfigError(f"{key}={size} is not divisible by trainer.tensor_parallel={tensor}")
    if sizes.groups % tensor and tensor % sizes.groups:
        raise ConfigError(
            f"num_key_value_heads={sizes.groups} is neither a multiple nor a divisor of "
            f"trainer.tensor_parallel={tensor}; Megatron cannot split the key-value groups"
        )
    fused = sizes.q_rows + 2 * sizes.kv_rows
    if fused % tensor:
        raise ConfigError(
            f"the fused qkv projection has {fused} rows, not divisible by trainer.tensor_parallel={tensor}"
        )
