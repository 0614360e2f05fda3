"""Megatron shards and Hugging Face tensors as rectangles of each other.

A `Piece` says: these rows and columns of that Hugging Face tensor are those rows and columns of that local parameter.
The pieces of a rank cover each element of each of its parameters exactly once, vocabulary padding excepted
(`Layout.pieces`); the pieces of `Layout.holders` cover each Hugging Face tensor exactly once. Loading, export and the
sync plan iterate over pieces and know nothing about families.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

from megasync.errors import ConfigError
from megasync.layout.families import Rule, Sizes, Split, family_of, sizes_of
from megasync.layout.families.rules import EMBEDDING, FINAL_NORM, HEAD
from megasync.layout.families.value_head import VALUE_HEAD
from megasync.layout.topology import Topology

# Megatron pads vocabularies so that each tensor rank holds a multiple of this many rows.
VOCAB_MULTIPLE = 64

T = TypeVar("T")


class Box(NamedTuple):
    """A rectangle: first row, rows, first column, columns.

    A vector of n elements is n rows of one column. A tensor of more than two dimensions counts as the matrix of all but
    its last dimension by the last.
    """

    row: int
    rows: int
    col: int
    cols: int

    def transposed(self) -> Box:
        return Box(self.col, self.cols, self.row, self.rows)


def intersect(one: Box, other: Box) -> Box | None:
    """The common rectangle of two boxes of the same tensor, if any."""
    row, col = max(one.row, other.row), max(one.col, other.col)
    rows = min(one.row + one.rows, other.row + other.rows) - row
    cols = min(one.col + one.cols, other.col + other.cols) - col
    return Box(row, rows, col, cols) if rows > 0 and cols > 0 else None


class Piece(NamedTuple):
    """The same values in a Hugging Face tensor and in a parameter; both boxes have the same size."""

    hf_name: str
    hf_box: Box
    param: str
    param_box: Box
    # `param_box` is a box of the transposed parameter. A vector transposed is a single row.
    turned: bool = False


class Section(NamedTuple):
    """Rows of a parameter that belong to one tensor: as many for each key head."""

    # The number of the tensor.
    tensor: int
    # The row at which those of the first key head begin.
    first: int
    # Rows of each key head.
    rows: int
    # Rows from one key head to the next.
    stride: int
    # Key heads.
    heads: int


class Holder(NamedTuple):
    """A piece, and all global ranks that hold it in the same box of a parameter of the same name, ascending."""

    piece: Piece
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """A rule applied to one stage: the local parameter, and its Hugging Face tensors with their shapes."""

    split: Split
    param: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    # The dtype in which an export stores them; None for the model's own.
    dtype: str | None = None
    # As in `Rule`.
    joined: bool = False
    all_tokens: bool = False
    # The expert-parallel coordinate of the ranks that hold it; None, outside experts: every rank of the stage.
    ep: int | None = None
    # The last stage's copy of a tied embedding: loaded there, but exported and sent by the first stage.
    copy: bool = False
    # The expert whose part of a tensor of all experts this is; `transposed`: that part is transposed.
    stacked: int | None = None
    transposed: bool = False
    # Those of a parameter that is cut by sections.
    sections: tuple[Section, ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor in the parameter, when that is not split."""
        shapes = (shape if self.stacked is None else shape[1:] for _, shape in self.tensors)
        return tuple(shape[::-1] if self.transposed else shape for shape in shapes)


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all ``tp`` ranks: the smallest multiple of 64 * tp that holds the vocabulary."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


class Layout:
    """The rectangles of one model on one topology.

    Args:
        hf_config: the language model in the model's config.json (`families.language_model`).
        topology: the trainer's ranks.
        spec: "local" or "te", the flavour of Megatron's layers (their parameter names differ).
        value_head: the model outputs one value per token (`families.value_head`), not logits.

    Raises ConfigError for an unsupported model, and for sizes that Megatron cannot split over this topology.
    """

    def __init__(
        self, hf_config: Mapping[str, Any], topology: Topology, spec: str = "local", value_head: bool = False
    ) -> None:
        if spec not in ("local", "te"):
            raise ConfigError(f"layer spec {spec!r} is unknown; it is 'local' or 'te'")
        self.hf_config = dict(hf_config)
        self.topology = topology
        self.spec = spec
        self.value_head = value_head
        self.family = family_of(hf_config)
        self.sizes = sizes_of(hf_config)
        _check_divisible(self.sizes, topology.tensor)
        _check_experts(self.sizes, topology)
        if self.family.norms_all_heads and self.sizes.groups % topology.tensor:
            raise ConfigError(
                f"trainer.tensor_parallel={topology.tensor} is not a divisor of num_key_value_heads="
                f"{self.sizes.groups}, over which {hf_config['model_type']} normalises keys; lower it"
            )
        if self.family.has_expert_biases and topology.expert_tensor_size > 1:
            raise ConfigError(
                f"experts of {hf_config['model_type']} have biases, which Megatron does not split: set "
                f"trainer.expert_tensor_parallel=1, not {topology.expert_tensor_size}"
                + ("" if topology.expert_tensor else " (as trainer.tensor_parallel)")
            )
        self.stages = topology.stage_layers(self.sizes.layers)
        self._placed: dict[int, list[Placed]] = {}

    def with_replicas(self, count: int) -> Layout:
        """The layout of as many replicas (`Topology.with_replicas`) of the same model."""
        return self.on(self.topology.with_replicas(count))

    def on(self, topology: Topology) -> Layout:
        """The layout of the same model on another topology."""
        return Layout(self.hf_config, topology, self.spec, self.value_head)

    @property
    def tied(self) -> bool:
        """Whether the embedding is also the output layer."""
        return self.sizes.tied and not self.value_head

    @property
    def padded_vocab(self) -> int:
        return padded_vocab(self.sizes.vocab, self.topology.tensor)

    @cached_property
    def hf_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the Hugging Face checkpoint, stage by stage; no head when it is tied."""
        return {name: shape for item in self._exported() for name, shape in item.tensors}

    @cached_property
    def frozen_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each further tensor of the checkpoint: those of a vision tower, which only servers load."""
        if self.family.vision is None:
            return {}
        return self.family.vision(self.hf_config["vision_config"], self.sizes.hidden)

    @cached_property
    def _own_dtypes(self) -> dict[str, str]:
        return {name: item.dtype for item in self._exported() if item.dtype for name, _ in item.tensors}

    def _exported(self) -> Iterator[Placed]:
        return (item for pp in range(self.topology.pipeline) for item in self.placed(pp) if not item.copy)

    def hf_dtype(self, name: str, dtype: str) -> str:
        """Name of the dtype that a Hugging Face export of a ``dtype`` model gives a tensor."""
        if name not in self.hf_tensors:
            raise KeyError(f"{name!r} is not a tensor of this model")
        return self._own_dtypes.get(name, dtype)

    # Parameters

    def placed(self, pp: int) -> list[Placed]:
        """The parameters of one stage's ranks. Megatron fuses the tensors of one entry."""
        if pp not in self._placed:
            self._placed[pp] = list(self._place_stage(pp))
        return self._placed[pp]

    def _place_stage(self, pp: int) -> Iterator[Placed]:
        last = self.topology.pipeline - 1
        chunks = len(self.stages[pp])
        for chunk, layers in enumerate(self.stages[pp]):
            prefix = f"{chunk}." if self.topology.virtual > 1 else ""
            if pp == 0 and chunk == 0:
                yield self._place(EMBEDDING, prefix)
            for local, layer in enumerate(layers):
                sparse = layer in self.sizes.sparse_layers
                attention = self.family.delta if layer in self.sizes.delta_layers else self.family.layer
                for rule in (*attention, *(self.family.sparse if sparse else self.family.dense)):
                    yield from self._place_in_layer(rule, prefix, layer, local)
            if pp == last and chunk == chunks - 1:
                yield self._place(FINAL_NORM, prefix)
                if self.value_head:
                    yield from (self._place(rule, prefix) for rule in VALUE_HEAD)
                elif not self.tied:
                    yield self.head()
                elif last > 0:
                    embedding = self._place(EMBEDDING, prefix)
                    yield replace(embedding, param=prefix + HEAD.param(self.spec), copy=True)

    def head(self) -> Placed:
        """The output layer of the last stage, also if it is tied to the embedding."""
        return self._place(HEAD, f"{len(self.stages[-1]) - 1}." if self.topology.virtual > 1 else "")

    def _place_in_layer(self, rule: Rule, prefix: str, layer: int, local: int) -> Iterator[Placed]:
        if not rule.per_expert:
            yield self._place(rule, prefix, layer, local)
            return
        share = self.sizes.experts // self.topology.expert
        for expert in range(self.sizes.experts):
            item = self._place(rule, prefix, layer, local, expert, expert % share)
            stacked = expert if rule.stacked else None
            yield replace(item, ep=expert // share, stacked=stacked, transposed=rule.transposed)

    def _place(
        self, rule: Rule, prefix: str, layer: int = 0, local: int = 0, expert: int = 0, local_expert: int = 0
    ) -> Placed:
        tensors = tuple(
            (self.family.named(tensor.name).format(layer=layer, expert=expert), self.sizes.shape(tensor.shape))
            for tensor in rule.tensors
        )
        param = rule.param(self.spec).format(layer=local, expert=local_expert)
        return Placed(
            rule.cut(self.spec),
            prefix + param,
            tensors,
            rule.dtype,
            rule.joined,
            rule.all_tokens,
            sections=_sections(rule, self.sizes),
        )

    def of_rank(self, rank: int) -> list[Placed]:
        """The parameters of one rank."""
        ep = self.topology.expert_coords(rank).ep
        return [item for item in self.placed(self.topology.coords(rank).pp) if item.ep in (None, ep)]

    def params(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Local shape of each parameter on a global rank, under the names of Megatron's ``named_parameters()``.

        With virtual stages a name begins with the number of its model chunk: ``1.decoder.layers.0...``.
        """
        return {item.param: self._local_shape(item) for item in self.of_rank(rank)}

    def _parts(self, item: Placed) -> int:
        """The number of ranks over which a parameter is split."""
        return self.topology.tensor if item.ep is None else self.topology.expert_tensor_size

    def _local_shape(self, item: Placed) -> tuple[int, ...]:
        parts = self._parts(item)
        first = item.shapes[0]
        rows = sum(shape[0] for shape in item.shapes)
        match item.split:
            case Split.REPLICATED:
                return first
            case Split.ROW:
                return (rows, first[1] // parts)
            case Split.VOCAB:
                return (self.padded_vocab // parts, *first[1:])
            case Split.COLUMN | Split.GATED | Split.QKV | Split.GATED_QKV | Split.SECTIONS:
                return (rows // parts, *first[1:])

    # Which ranks hold what

    def replicas(self, item: Placed, pp: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of stage ``pp`` that hold an entry of its `placed`: for each part, those with equal shards."""
        return _replicas(self.topology, pp, item.ep, item.split is Split.REPLICATED)

    def writers(self, rank: int) -> dict[str, int]:
        """For each parameter of a rank, the first of all ranks that hold the same shard under the same name.

        Without the last stage's copy of a tied embedding.
        """
        pp = self.topology.coords(rank).pp
        return {
            item.param: next(ranks[0] for ranks in self.replicas(item, pp) if rank in ranks)
            for item in self.of_rank(rank)
            if not item.copy
        }

    @cached_property
    def holders(self) -> dict[str, tuple[Holder, ...]]:
        """For each Hugging Face tensor, the pieces that cover it exactly once, and all ranks that hold each.

        Tied embeddings are those of the first stage.
        """
        holders: dict[str, list[Holder]] = {name: [] for name in self.hf_tensors}
        for pp in range(self.topology.pipeline):
            for item in self.placed(pp):
                if item.copy:
                    continue
                for part, ranks in enumerate(self.replicas(item, pp)):
                    for piece in self._pieces(item, part):
                        holders[piece.hf_name].append(Holder(piece, ranks))
        return {name: tuple(of_tensor) for name, of_tensor in holders.items()}

    # Rectangles

    def pieces(self, rank: int) -> list[Piece]:
        """Every rectangle of a global rank: each element of each parameter once, except vocabulary padding."""
        tp, etp = self.topology.coords(rank).tp, self.topology.expert_coords(rank).etp
        return [piece for item in self.of_rank(rank) for piece in self._pieces(item, tp if item.ep is None else etp)]

    def _pieces(self, item: Placed, part: int) -> Iterator[Piece]:
        for index, hf, local in self.rectangles(item, part):
            name, shape = item.tensors[index]
            if item.transposed:
                hf, local = hf.transposed(), local.transposed()
            if item.stacked is not None:
                hf = hf._replace(row=hf.row + item.stacked * prod(shape[1:-1]))
            yield Piece(name, hf, item.param, local, turned=item.transposed)

    def rectangles(self, item: Placed, part: int) -> Iterator[tuple[int, Box, Box]]:
        """(index of the Hugging Face tensor, its box, the local box) of one part of one parameter."""
        parts = self._parts(item)
        shape = item.shapes[0]
        rows, cols = shape[0], shape[-1] if len(shape) > 1 else 1
        match item.split:
            case Split.REPLICATED:
                yield 0, Box(0, rows, 0, cols), Box(0, rows, 0, cols)
            case Split.ROW:
                share = cols // parts
                yield 0, Box(0, rows, part * share, share), Box(0, rows, 0, share)
            case Split.COLUMN:
                share = rows // parts
                yield 0, Box(part * share, share, 0, cols), Box(0, share, 0, cols)
            case Split.VOCAB:
                share = self.padded_vocab // parts
                held = min(share, rows - part * share)
                if held > 0:
                    yield 0, Box(part * share, held, 0, cols), Box(0, held, 0, cols)
            case Split.GATED:
                fused = len(item.tensors) == 1
                half = rows // 2 if fused else rows
                share = half // parts
                for projection in range(2):
                    index, first = (0, projection * half) if fused else (projection, 0)
                    yield index, Box(first + part * share, share, 0, cols), Box(projection * share, share, 0, cols)
            case Split.QKV | Split.GATED_QKV:
                share = self._local_shape(item)[0]
                gated = item.split is Split.GATED_QKV
                for index, hf_row, local_row, count in _qkv_rows(self.sizes, part * share, share, gated):
                    yield index, Box(hf_row, count, 0, cols), Box(local_row, count, 0, cols)
            case Split.SECTIONS:
                for index, hf_row, local_row, count in _section_rows(item.sections, part, parts):
                    yield index, Box(hf_row, count, 0, cols), Box(local_row, count, 0, cols)


def split_by_bytes(sized: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Consecutive (item, bytes) in as few parts of at most ``limit`` bytes as possible; a larger item is a part."""
    part: list[T] = []
    size = 0
    for item, nbytes in sized:
        if part and size + nbytes > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    if part:
        yield part


@lru_cache(maxsize=4096)
def _replicas(topology: Topology, pp: int, ep: int | None, replicated: bool) -> tuple[tuple[int, ...], ...]:
    """Ranks of a stage (those with coordinate ``ep`` when it is given), by their part of a parameter."""
    by_part: dict[int, list[int]] = {}
    for rank in topology.stage_ranks(pp):
        expert = topology.expert_coords(rank)
        if ep in (None, expert.ep):
            part = topology.coords(rank).tp if ep is None else expert.etp
            by_part.setdefault(0 if replicated else part, []).append(rank)
    return tuple(tuple(by_part[part]) for part in sorted(by_part))


@lru_cache(maxsize=64)
def _qkv_rows(sizes: Sizes, start: int, count: int, gated: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Rows ``start .. start + count`` of the fused q..q k v parameter: (tensor, its row, local row, rows) each.

    ``gated``: gates follow a group's queries, and its first tensor has them after the query of each head.
    The split is contiguous whatever the number of groups, so with fewer groups than tensor ranks it falls inside a
    group: Megatron then gathers the projection's output and takes each rank's heads from it.
    """
    heads, dim = sizes.heads // sizes.groups, sizes.head_dim
    pieces: list[tuple[int, int, int, int]] = []
    fused = 0
    for group in range(sizes.groups):
        queries = [(0, group * heads * dim, heads * dim)]
        if gated:
            query_heads = range(group * heads, (group + 1) * heads)
            queries = [(0, (2 * head + gate) * dim, dim) for gate in range(2) for head in query_heads]
        for index, row, length in (*queries, (1, group * dim, dim), (2, group * dim, dim)):
            begin, end = max(fused, start), min(fused + length, start + count)
            if begin < end:
                pieces.append((index, row + begin - fused, begin - start, end - begin))
            fused += length
    return tuple(pieces)


def _sections(rule: Rule, sizes: Sizes) -> tuple[Section, ...]:
    """The sections of a rule, in the order of its parameter's rows."""
    sections: list[Section] = []
    for tensor, names in enumerate(rule.sections):
        assert sizes.delta is not None
        count, first = sizes.delta.keys, 0
        lengths = sizes.shape(names)
        for rows in lengths:
            sections.append(Section(tensor, first, rows, sum(lengths) if rule.grouped else rows, count))
            first += rows if rule.grouped else rows * count
    return tuple(sections)


@lru_cache(maxsize=1024)
def _section_rows(sections: tuple[Section, ...], part: int, parts: int) -> tuple[tuple[int, int, int, int], ...]:
    """Rows of one part of the sections, as those of `_qkv_rows`."""
    pieces: list[tuple[int, int, int, int]] = []
    local = 0
    for section in sections:
        share = section.heads // parts
        first = section.first + part * share * section.stride
        # Adjacent heads are one piece.
        runs, rows = (1, share * section.rows) if section.stride == section.rows else (share, section.rows)
        for run in range(runs):
            pieces.append((section.tensor, first + run * section.stride, local, rows))
            local += rows
    return tuple(pieces)


def _check_divisible(sizes: Sizes, tensor: int) -> None:
    """Raises ConfigError for heads, groups or widths that Megatron's own layers would refuse; it names both sides."""
    if sizes.heads % sizes.groups:
        raise ConfigError(f"num_attention_heads={sizes.heads} is not a multiple of num_key_value_heads={sizes.groups}")
    for key, size in {"num_attention_heads": sizes.heads, **sizes.widths}.items():
        if size % tensor:
            raise ConfigError(f"{key}={size} is not divisible by trainer.tensor_parallel={tensor}")
    if sizes.groups % tensor and tensor % sizes.groups:
        raise ConfigError(
            f"num_key_value_heads={sizes.groups} is neither a multiple nor a divisor of "
            f"trainer.tensor_parallel={tensor}; Megatron cannot split the key-value groups"
        )
    if sizes.delta and sizes.delta.keys % tensor:
        raise ConfigError(
            f"linear_num_key_heads={sizes.delta.keys} is not divisible by trainer.tensor_parallel={tensor}"
        )
    fused = sizes.q_rows + 2 * sizes.kv_rows
    if fused % tensor:
        raise ConfigError(
            f"the fused qkv projection has {fused} rows, not divisible by trainer.tensor_parallel={tensor}"
        )


def _check_experts(sizes: Sizes, topology: Topology) -> None:
    """Raises ConfigError for experts that cannot be split evenly, or an expert split of a model without experts."""
    expert, etp = topology.expert, topology.expert_tensor_size
    if not sizes.experts:
        for key, size in (("expert_parallel", expert), ("expert_tensor_parallel", topology.expert_tensor or 1)):
            if size > 1:
                raise ConfigError(f"trainer.{key}={size} splits experts, but the model has none; set it to 1")
        return
    if sizes.experts % expert:
        raise ConfigError(f"the model's {sizes.experts} experts are not divisible by trainer.expert_parallel={expert}")
    if sizes.moe_intermediate % etp:
        raise ConfigError(
            f"moe_intermediate_size={sizes.moe_intermediate} is not divisible by trainer.expert_tensor_parallel={etp}"
            + ("" if topology.expert_tensor else " (as trainer.tensor_parallel)")
        )
