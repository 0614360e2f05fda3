"""Which tensors travel in which bucket, and who sends it: a pure function of layout, bucket size and dtype.

Each Hugging Face tensor is in exactly one bucket, and the contributions of a bucket cover its bytes exactly once.
Every rank and the driver derive the same plan without communication. Of the ranks that hold the same piece, the first
hands it to the sender of their pipeline stage. Buckets of different senders alternate, so that one packs while another
transmits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import prod

from megasync.layout.layout import Layout, Piece, Placed, split_by_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class BucketTensor:
    """One whole tensor inside a bucket, ``offset`` bytes from its start."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of one stage and one dtype, as one message of ``nbytes`` bytes.

    ``sender`` is a global trainer rank. ``contributions`` maps each rank that holds a part to its pieces, in the order
    in which it hands them over.
    """

    stage: int
    sender: int
    tensors: tuple[BucketTensor, ...]
    nbytes: int
    dtype: str
    contributions: dict[int, tuple[Piece, ...]]


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """All buckets in wire order. ``dtype`` is the served dtype's torch name; `Layout.hf_dtype` knows the exceptions.

    ``layout`` and ``bucket_bytes`` are what it was made from.
    """

    buckets: tuple[Bucket, ...]
    dtype: str
    layout: Layout = field(compare=False)
    bucket_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of one full set of weights."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def senders(self) -> tuple[int, ...]:
        """The sending rank of each pipeline stage."""
        return tuple(dict(sorted((bucket.stage, bucket.sender) for bucket in self.buckets)).values())

    def with_data_parallel(self, size: int) -> BroadcastPlan:
        """The plan for another number of data-parallel ranks. It has the same tensors in the same buckets."""
        topology = self.layout.topology
        if size == topology.data:
            return self
        return plan_broadcast(self.layout.on(replace(topology, data=size)), self.bucket_bytes, self.dtype)

    def members(self, stage: int) -> tuple[int, ...]:
        """The ranks that take part in sending a pipeline stage, ascending; the sender is the first."""
        ranks = {rank for bucket in self.of_stage(stage) for rank in (bucket.sender, *bucket.contributions)}
        return tuple(sorted(ranks))

    def of_stage(self, stage: int) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.stage == stage)


def plan_broadcast(layout: Layout, bucket_bytes: int, dtype: str) -> BroadcastPlan:
    """Fills buckets of at most ``bucket_bytes`` in checkpoint order, stage by stage.

    A fused group (q, k, v; gate, up; whatever is `joined`) stays in one bucket. A group above the limit gets a bucket
    of its own.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r} cannot be served; known are {', '.join(ITEM_BYTES)}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive")
    stages = [_stage_buckets(layout, stage, bucket_bytes, dtype) for stage in range(layout.topology.pipeline)]
    rounds = zip_longest(*stages)
    buckets = tuple(bucket for turn in rounds for bucket in turn if bucket is not None)
    return BroadcastPlan(buckets, dtype, layout, bucket_bytes)


def group_name(name: str, stage: int) -> str:
    """Name of the process group in which the sender of a pipeline stage talks to the servers."""
    return f"{name}-stage{stage}"


def _stage_buckets(layout: Layout, stage: int, limit: int, dtype: str) -> Iterator[Bucket]:
    """Buckets of the model's dtype first; the few tensors of another dtype get buckets of their own."""
    kinds: dict[str, list[Placed]] = {dtype: []}
    for item in layout.placed(stage):
        if not item.copy:
            kinds.setdefault(item.dtype or dtype, []).append(item)
    for kind, items in kinds.items():
        groups = [(group, sum(_nbytes(layout.hf_tensors[name], kind) for name in group)) for group in _groups(items)]
        for part in split_by_bytes(groups, limit):
            yield _bucket(layout, stage, [name for group in part for name in group], kind)


def _groups(items: list[Placed]) -> list[list[str]]:
    """Names of the tensors that must travel together."""
    groups: list[list[str]] = []
    seen: set[str] = set()
    for item in items:
        if not (item.joined and groups):
            groups.append([])
        # The parameters of all experts may be in one tensor.
        groups[-1] += [name for name, _ in item.tensors if name not in seen]
        seen.update(name for name, _ in item.tensors)
    return [group for group in groups if group]


def _bucket(layout: Layout, stage: int, names: list[str], dtype: str) -> Bucket:
    topology = layout.topology
    entries: list[BucketTensor] = []
    offset = 0
    contributions: dict[int, list[Piece]] = {}
    for name in names:
        shape = layout.hf_tensors[name]
        entries.append(BucketTensor(name, shape, offset))
        offset += _nbytes(shape, dtype)
        for piece, ranks in layout.holders[name]:
            contributions.setdefault(ranks[0], []).append(piece)
    return Bucket(
        stage=stage,
        sender=topology.rank(0, 0, stage),
        tensors=tuple(entries),
        nbytes=offset,
        dtype=dtype,
        contributions={rank: tuple(contributions[rank]) for rank in sorted(contributions)},
    )


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return ITEM_BYTES[dtype] * prod(shape)
