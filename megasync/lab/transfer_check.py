"""Executes a shard-to-shard plan in this process, bucket by bucket, and compares every bit at both ends.

    Hugging Face ─▶ trainer shards ─▶ buckets ─▶ engine parameters ─▶ compared with Hugging Face
                          └─▶ assembled ─▶ compared with Hugging Face

The code of a real run fills shards, packs buckets and places them (`fill_param`, `packing`, `rectangles`); only the
wire is missing. A trainer parameter lives from the first to the last bucket that reads it, an engine parameter from
the first to the last one that writes it, so models larger than memory can be checked. All memory is poisoned before it
is written, so that unwritten elements show.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeVar

import torch

from megasync.layout.engine_layout import EngineRank, Fill, Slot
from megasync.layout.layout import Box, Layout
from megasync.layout.shards import Read, assemble, fill_param, piece_of, pieces_by_param
from megasync.sync.messages import ReceivePlan
from megasync.sync.shard.arena import rectangles
from megasync.sync.shard.plan import ShardBucket, ShardPlan, receive_plan
from megasync.sync.shard.sender import packing

# Every float made of such bytes is NaN.
POISON = 0xFF
# Writes of one element are counted up to this number.
MOST_WRITES = 255

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Problem(NamedTuple):
    """``tensor`` is a Hugging Face tensor, or an engine's parameter when no tensor is concerned."""

    tensor: str
    where: str
    what: str


@dataclass
class TransferReport:
    """The result of a check."""

    problems: list[Problem] = field(default_factory=list)
    # The most that shards, messages and engine parameters took together.
    peak_bytes: int = 0
    # Elements by engine parameter that loading a checkpoint does not write either.
    untouched: Counter[str] = field(default_factory=Counter)


def check_transfer(
    layout: Layout, engine: Sequence[EngineRank], plan: ShardPlan, read: Read, dtype: str
) -> TransferReport:
    """Moves every bucket of a plan, and compares the result with a load of the same tensors.

    ``read`` must be deterministic. ``dtype`` is that of the trainer's parameters.
    """
    report = TransferReport()
    checkpoint = _Checkpoint(layout, read, dtype)
    trainer = checkpoint.trainer()
    ranks = [
        _EngineSide(tp, rank, receive_plan(plan, tp, "", rank.fills), checkpoint, report)
        for tp, rank in enumerate(engine)
    ]
    uses = Counter(use for bucket in plan.buckets for use in _uses(bucket))
    for tag, bucket in enumerate(plan.buckets):
        message = torch.full((bucket.nbytes,), POISON, dtype=torch.uint8)
        shards, target = trainer[bucket.source], ranks[bucket.target]
        misfits = [*_misfits(bucket, shards), *target.misfits(bucket)]
        report.problems.extend(misfits)
        if not misfits:
            for to, source in zip(*packing(bucket, message, shards), strict=True):
                to.copy_(source)
            target.take(tag, message)
        held = message.nbytes + _nbytes(trainer) + sum(rank.nbytes for rank in ranks)
        report.peak_bytes = max(report.peak_bytes, held)
        target.release(bucket)
        for use in _uses(bucket):
            uses[use] -= 1
            if not uses[use]:
                trainer[use[0]].pop(use[1], None)
    for rank in ranks:
        rank.finish()
    _compare_assembled(checkpoint, report)
    return report


def _uses(bucket: ShardBucket) -> Iterator[tuple[int, str]]:
    """(trainer rank, parameter) of each piece in a bucket."""
    return ((bucket.source, piece.param) for region in bucket.regions for piece in region.sources)


def _misfits(bucket: ShardBucket, shards: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
    """Pieces of a bucket that its sender does not hold."""
    for region in bucket.regions:
        for piece in region.sources:
            held = piece_of(shards[piece.param], piece).numel()
            if held != piece.hf_box.rows * piece.hf_box.cols:
                what = f"{piece.param} has no box {tuple(piece.param_box)}"
                yield Problem(piece.hf_name, f"trainer rank {bucket.source}", what)


class _OnDemand(dict[K, V]):
    """A mapping that makes each value at its first use."""

    def __init__(self, make: Callable[[K], V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: K) -> V:
        value = self[key] = self._make(key)
        return value


Trainer = _OnDemand[int, _OnDemand[str, torch.Tensor]]


@dataclass(frozen=True)
class _Checkpoint:
    """The Hugging Face tensors, as a trainer in ``dtype`` holds and sends them."""

    layout: Layout
    read: Read
    dtype: str

    def trainer(self) -> Trainer:
        """The parameters of each rank by name."""
        return _OnDemand(self._rank)

    def _rank(self, rank: int) -> _OnDemand[str, torch.Tensor]:
        shapes, pieces = self.layout.params(rank), pieces_by_param(self.layout, rank)
        return _OnDemand(
            lambda param: fill_param(
                shapes[param], pieces[param], self.read, self._wire_dtype(pieces[param][0].hf_name)
            )
        )

    def sent(self, name: str, box: Box) -> torch.Tensor:
        return self.read(name, box).to(self._wire_dtype(name))

    def whole(self, name: str) -> torch.Tensor:
        shape = self.layout.hf_tensors[name]
        rows, cols = (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)
        return self.sent(name, Box(0, rows, 0, cols)).view(shape)

    def _wire_dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.layout.hf_dtype(name, self.dtype))


def _nbytes(trainer: Trainer) -> int:
    return sum(param.nbytes for rank in trainer.values() for param in rank.values())


class _EngineSide:
    """One engine rank: receives buckets, and checks each parameter after its last bucket."""

    def __init__(
        self, tp: int, rank: EngineRank, received: ReceivePlan, checkpoint: _Checkpoint, report: TransferReport
    ) -> None:
        self._where = f"engine rank {tp}"
        self._rank = rank
        self._checkpoint = checkpoint
        self._report = report
        self._live = _OnDemand(self._poisoned)
        # How often each element was written, by parameter.
        self._written = _OnDemand[str, torch.Tensor](lambda param: torch.zeros(rank.sizes[param], dtype=torch.uint8))
        self._inbound = {bucket.tag: bucket for bucket in received.buckets}
        self._left = Counter(rectangle.param for bucket in received.buckets for rectangle in bucket.rectangles)
        self._slots: dict[str, list[Slot]] = defaultdict(list)
        self._fills: dict[str, list[Fill]] = defaultdict(list)
        for slot in rank.slots:
            self._slots[slot.param].append(slot)
        for fill in received.fills:
            self._fills[fill.param].append(fill)
        self._checked: set[str] = set()

    def _poisoned(self, param: str) -> torch.Tensor:
        """An engine parameter as a flat tensor."""
        live = torch.empty(self._rank.sizes[param], dtype=getattr(torch, self._rank.dtypes[param]))
        live.view(torch.uint8).fill_(POISON)
        return live

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._live.values(), *self._written.values()))

    def misfits(self, bucket: ShardBucket) -> Iterator[Problem]:
        """Regions of a bucket that do not fit into this rank's parameters."""
        for slot in (region.slot for region in bucket.regions):
            last, size = slot.rectangle.last, self._rank.sizes[slot.param]
            if last >= size:
                what = f"is sent to elements up to {last} of {slot.param}, which has {size}"
                yield Problem(slot.hf_name, self._where, what)

    @torch.no_grad()
    def take(self, tag: int, message: torch.Tensor) -> None:
        """Writes a message where this rank's receive plan says."""
        inbound = self._inbound[tag]
        for target, source in rectangles(inbound, message, self._live):
            target.copy_(source)
        for rectangle in inbound.rectangles:
            counts = rectangle.of(self._written[rectangle.param])
            counts.add_(counts < MOST_WRITES)

    def release(self, bucket: ShardBucket) -> None:
        """Checks and frees the parameters for which no bucket is left."""
        for region in bucket.regions:
            self._left[region.slot.param] -= 1
            if not self._left[region.slot.param]:
                self._check(region.slot.param)

    def finish(self) -> None:
        """Checks the parameters that not all of their buckets, or none, have reached."""
        for param in self._rank.sizes.keys() - self._checked:
            self._check(param)

    @torch.no_grad()
    def _check(self, param: str) -> None:
        live, counts = self._live[param], self._written[param]
        for fill in self._fills[param]:
            # After the buckets, so that a fill over loaded elements shows.
            fill.rectangle.of(live).fill_(fill.value)
        loaded = torch.zeros_like(counts)
        for slot in self._slots[param]:
            rectangle = slot.rectangle
            self._check_slot(slot, rectangle.of(live), rectangle.of(counts))
            rectangle.of(loaded).fill_(1)
        if stray := int((counts.bool() & ~loaded.bool()).sum()):
            self._add_problem(param, f"{stray} elements are written that a load does not write")
        for fill in self._fills[param]:
            fill.rectangle.of(loaded).fill_(1)
        if untouched := int((loaded == 0).sum()):
            self._report.untouched[param] += untouched
        self._live.pop(param)
        self._written.pop(param)
        self._checked.add(param)

    def _check_slot(self, slot: Slot, live: torch.Tensor, counts: torch.Tensor) -> None:
        fewest, most = int(counts.min()), int(counts.max())
        if (fewest, most) != (1, 1):
            times = f"{fewest} times" if fewest == most else f"{fewest} to {most} times"
            self._add_problem(slot.hf_name, f"its elements in {slot.param} are written {times} instead of once")
        expected = self._checkpoint.sent(slot.hf_name, slot.hf_box).to(live.dtype).view(live.shape)
        if different := _different(live, expected):
            self._add_problem(
                slot.hf_name, f"{different} of {expected.numel()} elements in {slot.param} differ from a load's"
            )

    def _add_problem(self, tensor: str, what: str) -> None:
        self._report.problems.append(Problem(tensor, self._where, what))


def _compare_assembled(checkpoint: _Checkpoint, report: TransferReport) -> None:
    """Assembles each Hugging Face tensor from the trainer's shards, as an export does, and compares it."""
    layout, trainer = checkpoint.layout, checkpoint.trainer()
    compared: set[str] = set()
    for item in (item for pp in range(layout.topology.pipeline) for item in layout.placed(pp) if not item.copy):
        for name, _ in item.tensors:
            if name in compared:
                continue
            compared.add(name)
            assembled = assemble(name, layout, lambda rank, param: trainer[rank][param])
            report.peak_bytes = max(report.peak_bytes, assembled.nbytes + _nbytes(trainer))
            if different := _different(assembled, checkpoint.whole(name)):
                what = f"{different} of {assembled.numel()} elements differ when the shards are assembled"
                report.problems.append(Problem(name, "trainer", what))
        for rank in trainer.values():
            rank.clear()


def _different(one: torch.Tensor, other: torch.Tensor) -> int:
    """Elements whose bits are not the same."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return int((one.contiguous().view(words) != other.contiguous().view(words)).sum())
