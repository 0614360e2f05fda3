"""Who sends which rectangle to which serving rank: a pure function of the trainer's layout and the engine's slots.

Every slot of every engine rank is cut at the boundaries of the trainer's shards. For each engine rank some of the ranks
that hold a cut are chosen as its sources (`_choose_sources`), few of them, and each cut goes to the source with the
fewest bytes so far. A large cut that is contiguous in its sender's memory is a bucket of its own, sent without a copy.
The others that the same rank sends into the same slot are merged into the largest rectangles and packed into buckets of
limited size. Nothing is gathered anywhere, and each byte travels once to every engine rank that keeps it.

A plan is made for the replicas that feed one engine (`shard.feeds`), not for all of them, so neither its size nor the
time to make it depends on data parallelism. Engines that other replicas feed use the same plan with other ranks.

Messages form rounds, one of each pair of ranks in each. A rank sends by round, then by engine rank; an engine rank
receives by round, in any order of its sources. So the ranks of an engine and its sources may handle all their messages
in one queue: of the messages left, both ends of the one with the lowest (round, engine rank) have it at the head of
their queues, so it can always be sent.

Trainer ranks and driver derive the same plan from the same inputs without communication.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import prod

from megasync.errors import SyncError
from megasync.layout.engine_layout import EngineRank, Fill, Slot
from megasync.layout.layout import Box, Layout, Piece, intersect
from megasync.layout.quantized import VALUES_DTYPE
from megasync.sync.broadcast.plan import ITEM_BYTES
from megasync.sync.messages import InboundBucket, ReceivePlan

# Messages are whole words, because digests are sums of words.
WORD_BYTES = 8
# From this size on, a message of its own costs less than packing with others: each one takes the receiving thread some
# turns at the GIL, which are slow while the engine decodes on the same cores.
DIRECT_BYTES = 2**21
# An engine rank gets further sources, to balance their work, up to this number of them, and only when the new one takes
# over at least this part of its bytes.
MOST_SOURCES = 16
LEAST_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class Region:
    """One rectangle on the wire: where the receiver puts it, and the sender's pieces that fill it exactly."""

    slot: Slot
    sources: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return self.slot.hf_box.rows * self.slot.hf_box.cols


@dataclass(frozen=True, slots=True)
class ShardBucket:
    """Regions that trainer rank ``source`` sends to tensor-parallel rank ``target`` of an engine as one message.

    Regions follow one another, row by row, as elements of ``dtype``; the end is padded to whole words. A ``direct``
    bucket is a single region that is contiguous in its single source.
    """

    source: int
    target: int
    dtype: str
    regions: tuple[Region, ...]
    direct: bool = False

    @property
    def elements(self) -> int:
        return sum(region.elements for region in self.regions)

    @property
    def nbytes(self) -> int:
        """Bytes of the message, a multiple of `WORD_BYTES`."""
        return -(-self.elements * ITEM_BYTES[self.dtype] // WORD_BYTES) * WORD_BYTES


@dataclass(frozen=True)
class ShardPlan:
    """All buckets, in the order in which every rank handles its own; a bucket's index is its tag on the wire."""

    buckets: tuple[ShardBucket, ...]
    engine_ranks: int

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def sources(self) -> tuple[int, ...]:
        """The trainer ranks that send, ascending. They come first in the links' group, then the engine's ranks."""
        return tuple(sorted({bucket.source for bucket in self.buckets}))

    @property
    def largest_packed(self) -> int:
        """Bytes of the largest bucket that is packed; a sender holds two."""
        return max((bucket.nbytes for bucket in self.buckets if not bucket.direct), default=0)

    @cached_property
    def digest(self) -> str:
        """Equal where the same plan was derived."""
        return hashlib.sha256(repr((self.engine_ranks, self.buckets)).encode()).hexdigest()[:16]

    def of_source(self, rank: int) -> list[tuple[int, ShardBucket]]:
        return [(tag, bucket) for tag, bucket in enumerate(self.buckets) if bucket.source == rank]

    def of_target(self, tp: int) -> list[tuple[int, ShardBucket]]:
        return [(tag, bucket) for tag, bucket in enumerate(self.buckets) if bucket.target == tp]

    def confirmed_to(self, source: int) -> list[int]:
        """The engine ranks that tell this trainer rank, the lowest of their sources, when they hold a whole version."""
        lowest: dict[int, int] = {}
        for bucket in self.buckets:
            lowest[bucket.target] = min(bucket.source, lowest.get(bucket.target, bucket.source))
        return [tp for tp, rank in lowest.items() if rank == source]

    def sources_of(self, tp: int) -> list[int]:
        """The trainer ranks that send to an engine rank, ascending."""
        return sorted({bucket.source for bucket in self.buckets if bucket.target == tp})

    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each sending trainer rank puts on the wire."""
        sent: dict[int, int] = defaultdict(int)
        for bucket in self.buckets:
            sent[bucket.source] += bucket.nbytes
        return sent


def plan_shards(
    layout: Layout, engine: Sequence[EngineRank], bucket_bytes: int, dtype: str, shares: Sequence[int] | None = None
) -> ShardPlan:
    """Plans the transfer of a full set of weights into one engine.

    Args:
        layout: of the replicas that feed the engine (`Topology.with_replicas`).
        engine: what each tensor-parallel rank of the engine keeps.
        bucket_bytes: largest message; a single row above it gets a message of its own.
        dtype: the trainer's parameter dtype.
        shares: what each replica sends, relative to the others; equal parts if None.

    Raises SyncError for a tensor that no engine rank keeps, and for one that only the engine has.
    """
    check_coverage(layout, engine)
    topology = layout.topology
    shares = shares or [1] * topology.replicas
    share_of = [shares[topology.replica_of(rank)] for rank in range(topology.world)]
    shapes = [layout.params(rank) for rank in range(topology.world)]
    parts_of = [list(_parts_of(rank, layout, bucket_bytes, dtype)) for rank in engine]
    load, lanes = _Load(share_of), dict[tuple[int, int], list[ShardBucket]]()
    for target, (parts, sources) in enumerate(zip(parts_of, _choose_sources(parts_of, share_of), strict=True)):
        chosen: dict[int, int] = {}
        # The largest first, so that the small ones even out what remains.
        for index in sorted(range(len(parts)), key=lambda index: -parts[index].nbytes):
            chosen[index] = load.lowest(sources[parts[index].ranks])
            load.add(chosen[index], parts[index].nbytes)
        regions: dict[tuple[int, str], list[Region]] = defaultdict(list)
        for index, part in enumerate(parts):
            regions[chosen[index], part.dtype].extend(part.regions())
        for (source, wire), of_lane in regions.items():
            buckets = _buckets(source, target, wire, of_lane, bucket_bytes, shapes[source])
            lanes.setdefault((target, source), []).extend(buckets)
    # Taking one bucket of each lane in turn keeps every link busy.
    rounds = zip_longest(*(lanes[lane] for lane in sorted(lanes)))
    return ShardPlan(tuple(bucket for turn in rounds for bucket in turn if bucket is not None), len(engine))


def check_coverage(layout: Layout, engine: Sequence[EngineRank]) -> None:
    """Checks that the engine's ranks keep every tensor completely, in a dtype that a cast gives, and no other ones.

    Each engine parameter must be written. Raises SyncError, which names the tensor or the parameter.
    """
    kept: dict[str, set[Box]] = defaultdict(set)
    for target, rank in enumerate(engine):
        for slot in rank.slots:
            kept[slot.hf_name].add(slot.hf_box)
            _check_dtype(layout, slot, rank.dtypes[slot.param])
        if rank.unwritten:
            raise SyncError(
                f"loading a checkpoint leaves {len(rank.unwritten)} parameters of engine rank {target} unwritten: "
                f"{', '.join(rank.unwritten[:3])}"
            )
    unknown = sorted(kept.keys() - layout.hf_tensors.keys())
    if unknown:
        raise SyncError(f"the engine keeps {unknown[0]!r}, which the trainer's layout does not have")
    for name, shape in layout.hf_tensors.items():
        covered = sum(box.rows * box.cols for box in _disjoint(kept[name]))
        if covered != prod(shape):
            raise SyncError(f"the engine's ranks keep {covered} of the {prod(shape)} elements of {name!r}")


def _check_dtype(layout: Layout, slot: Slot, dtype: str) -> None:
    """Raises SyncError if the engine keeps a tensor in a dtype that a cast does not give."""
    # A tensor that only the engine has is refused for that.
    sent = layout.hf_dtype(slot.hf_name, "") if slot.hf_name in layout.hf_tensors else ""
    if dtype in ITEM_BYTES and (dtype == VALUES_DTYPE) == (sent == VALUES_DTYPE):
        return
    if sent == VALUES_DTYPE:
        raise SyncError(
            f"the engine keeps {slot.param!r} in {dtype}, but rollout.fp8=true sends {slot.hf_name!r} in block FP8; "
            f"serve the folder as it is stored, or set rollout.fp8=false"
        )
    raise SyncError(
        f"the engine keeps {slot.param!r} in {dtype}, which needs more than a cast; serve the model unquantized, set "
        f"rollout.fp8=true for a folder in block FP8, or set sync.transport to broadcast or disk, where the engine "
        f"loads weights itself"
    )


def _disjoint(boxes: set[Box]) -> list[Box]:
    """The boxes without those inside another one (replicas keep equal boxes, which are one element of the set)."""
    disjoint: list[Box] = []
    for box in sorted(boxes, key=lambda box: -box.rows * box.cols):
        if not any(intersect(box, other) == box for other in disjoint):
            disjoint.append(box)
    return disjoint


def _chunks(slot: Slot, elements: int) -> Iterator[Slot]:
    """The slot in slices of whole rows, of at most ``elements`` elements (but at least one row) each."""
    box = slot.hf_box
    step = max(1, elements // box.cols)
    for row in range(box.row, box.row + box.rows, step):
        yield slot.part(box._replace(row=row, rows=min(step, box.row + box.rows - row)))


@dataclass
class _Load:
    """What each rank sends so far, in bytes over the share of its replica."""

    shares: Sequence[int]
    relative: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.relative = [0.0] * len(self.shares)

    def add(self, rank: int, nbytes: float) -> None:
        self.relative[rank] += nbytes / self.shares[rank]

    def lowest(self, ranks: Iterable[int]) -> int:
        return min(ranks, key=lambda rank: (self.relative[rank], rank))


@dataclass(frozen=True)
class _Part:
    """What of one slot the same ``ranks`` hold: boxes of the tensor, and the pieces that have them."""

    slot: Slot
    dtype: str
    ranks: tuple[int, ...]
    boxes: tuple[tuple[Box, Piece], ...]

    @cached_property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * sum(box.rows * box.cols for box, _ in self.boxes)

    def regions(self) -> Iterator[Region]:
        small: list[tuple[Box, Piece]] = []
        for box, piece in self.boxes:
            if box.rows * box.cols * ITEM_BYTES[self.dtype] >= DIRECT_BYTES:
                yield Region(self.slot.part(box), (_clip(piece, box),))
            else:
                small.append((box, piece))
        for box in _merge([box for box, _ in small]):
            inside = ((common, piece) for common, piece in small if intersect(common, box))
            yield Region(self.slot.part(box), tuple(_clip(piece, common) for common, piece in inside))


def _parts_of(rank: EngineRank, layout: Layout, bucket_bytes: int, dtype: str) -> Iterator[_Part]:
    """All that one engine rank keeps, in slices of its slots, by the ranks that hold them."""
    for slot in rank.slots:
        wire = layout.hf_dtype(slot.hf_name, dtype)
        for chunk in _chunks(slot, max(1, bucket_bytes // ITEM_BYTES[wire])):
            by_ranks: dict[tuple[int, ...], list[tuple[Box, Piece]]] = defaultdict(list)
            for holder in layout.holders[slot.hf_name]:
                if common := intersect(chunk.hf_box, holder.piece.hf_box):
                    by_ranks[holder.ranks].append((common, holder.piece))
            for ranks, boxes in by_ranks.items():
                yield _Part(chunk, wire, ranks, tuple(boxes))


def _choose_sources(
    parts_of: Sequence[Sequence[_Part]], share_of: Sequence[int]
) -> list[dict[tuple[int, ...], list[int]]]:
    """For each engine rank and each group of ranks with equal shards, those that send them: few, and with little load.

    A source that is needed anyway serves every group that it belongs to. Beyond those, the groups with the most bytes
    per source get more sources, within `MOST_SOURCES` and `LEAST_SHARE`.
    """
    load = _Load(share_of)
    wanted: list[tuple[dict[tuple[int, ...], int], set[int]]] = []
    for parts in parts_of:
        nbytes: dict[tuple[int, ...], int] = defaultdict(int)
        for part in parts:
            nbytes[part.ranks] += part.nbytes
        sources = {ranks[0] for ranks in nbytes if len(ranks) == 1}
        wanted.append((nbytes, sources))
        for ranks, size in nbytes.items():
            needed = sources.intersection(ranks)
            for rank in needed:
                load.add(rank, size / len(needed))
    for nbytes, sources in wanted:
        groups = sorted(nbytes, key=lambda ranks: (-nbytes[ranks], ranks))
        for ranks in groups:
            if sources.isdisjoint(ranks):
                sources.add(source := load.lowest(ranks))
                load.add(source, nbytes[ranks])
        least = LEAST_SHARE * sum(nbytes.values())
        while len(sources) < MOST_SOURCES:
            gains = [
                (nbytes[ranks] / (1 + len(sources.intersection(ranks))), ranks)
                for ranks in groups
                if not sources.issuperset(ranks)
            ]
            gain, ranks = max(gains, default=(0, ()))
            if not ranks or gain < least:
                break
            sources.add(load.lowest(rank for rank in ranks if rank not in sources))
    return [{ranks: [rank for rank in ranks if rank in sources] for ranks in nbytes} for nbytes, sources in wanted]


def _merge(boxes: Iterable[Box]) -> list[Box]:
    """The same area, with boxes that share a whole side joined: first downwards, then sideways."""
    sideways = _stack(box.transposed() for box in _stack(boxes))
    return [box.transposed() for box in sideways]


def _stack(boxes: Iterable[Box]) -> list[Box]:
    """The same area, with boxes of the same columns that follow one another downwards joined."""
    stacked: list[Box] = []
    for box in sorted(boxes, key=lambda box: (box.col, box.cols, box.row)):
        last = stacked[-1] if stacked else None
        if last and (last.col, last.cols, last.row + last.rows) == (box.col, box.cols, box.row):
            stacked[-1] = last._replace(rows=last.rows + box.rows)
        else:
            stacked.append(box)
    return stacked


def _clip(piece: Piece, box: Box) -> Piece:
    """The part of a piece that is ``box`` of its Hugging Face tensor."""
    down, right = box.row - piece.hf_box.row, box.col - piece.hf_box.col
    local = piece.param_box
    return piece._replace(hf_box=box, param_box=Box(local.row + down, box.rows, local.col + right, box.cols))


def _buckets(
    source: int,
    target: int,
    dtype: str,
    regions: Sequence[Region],
    limit: int,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[ShardBucket]:
    """Direct buckets for large contiguous regions; the others in order, in as few buckets as the limit allows."""
    held: list[Region] = []
    size = 0
    for region in regions:
        nbytes = region.elements * ITEM_BYTES[dtype]
        if nbytes >= DIRECT_BYTES and _contiguous(region, shapes, ITEM_BYTES[dtype]):
            yield ShardBucket(source, target, dtype, (region,), direct=True)
            continue
        if held and size + nbytes > limit:
            yield ShardBucket(source, target, dtype, tuple(held))
            held, size = [], 0
        held.append(region)
        size += nbytes
    if held:
        yield ShardBucket(source, target, dtype, tuple(held))


def _contiguous(region: Region, shapes: Mapping[str, tuple[int, ...]], item_bytes: int) -> bool:
    """Whether a region is a contiguous range of whole words in its only source's memory."""
    piece, *others = region.sources
    if others or piece.turned:
        return False
    box, width = piece.param_box, prod(shapes[piece.param][1:])
    start = (box.row * width + box.col) * item_bytes
    of_words = start % WORD_BYTES == 0 and region.elements * item_bytes % WORD_BYTES == 0
    return of_words and (box.cols == width or box.rows == 1)


def receive_plan(
    plan: ShardPlan,
    target: int,
    name: str,
    fills: Sequence[Fill],
    turn: int = 0,
    world_rank: Callable[[int], int] = int,
) -> ReceivePlan:
    """The plan that rank ``target`` of an engine needs to receive and commit: no sender's pieces.

    Engines that the same ranks feed differ in ``turn``: in each round they receive from different ranks. ``world_rank``
    gives the trainer rank that is a source of the plan.
    """
    sources = plan.sources_of(target)
    order = {source: (place - turn) % len(sources) for place, source in enumerate(sources)}
    rounds: dict[int, int] = defaultdict(int)
    turns: list[tuple[int, int, int, ShardBucket]] = []
    for tag, bucket in plan.of_target(target):
        turns.append((rounds[bucket.source], order[bucket.source], tag, bucket))
        rounds[bucket.source] += 1
    buckets: list[InboundBucket] = []
    for _, _, tag, bucket in sorted(turns, key=lambda turn: turn[:2]):
        rectangles = tuple(region.slot.rectangle for region in bucket.regions)
        source = world_rank(bucket.source)
        buckets.append(InboundBucket(tag, source, bucket.dtype, bucket.elements, bucket.nbytes, rectangles))
    return ReceivePlan(name, tuple(buckets), tuple(fills))
