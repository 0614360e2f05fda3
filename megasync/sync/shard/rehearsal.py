"""Carries a shard-to-shard plan out in this process, parcel by parcel, and looks at every bit at both ends.

    Hugging Face ─▶ trainer shards ─▶ parcels ─▶ engine parameters ─▶ compared with Hugging Face
                          └─▶ assembled ─▶ compared with Hugging Face

Shards are filled, parcels packed and placed by the code that does it in a run (`fill_param`, `packing`, `Program`); only
the wire is missing. Nothing is kept longer than the plan needs it: a trainer parameter lives from the first to the last
parcel that reads it, an engine parameter from the first to the last one that writes it, so that models larger than
memory can be checked. All memory is poisoned before it is written, so that what nobody writes shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megasync.layout.engine_layout import EngineRank, Fill, Slot
from megasync.layout.layout import Box, Layout
from megasync.layout.shards import Read, assemble, box_of, fill_param, pieces_by_param
from megasync.sync.shard.inbound import Inbound, Place, Program
from megasync.sync.shard.plan import Parcel, ShardPlan, receive_program
from megasync.sync.shard.sender import packing

# Every float made of such bytes is NaN.
POISON = 0xFF
# More writes of one element than this count as this many.
MOST_WRITES = 255


class Problem(NamedTuple):
    """``tensor`` is a Hugging Face tensor, or an engine's parameter where no tensor is to blame."""

    tensor: str
    where: str
    what: str


@dataclass
class Outcome:
    """``peak_bytes`` is the most that shards, messages and engine parameters took together.

    ``untouched`` counts elements of engine parameters that loading a checkpoint does not write either.
    """

    problems: list[Problem] = field(default_factory=list)
    peak_bytes: int = 0
    untouched: Counter[str] = field(default_factory=Counter)


def carry_out(layout: Layout, engine: Sequence[EngineRank], plan: ShardPlan, read: Read, dtype: str) -> Outcome:
    """Moves every parcel of a plan, and compares what arrives with what a load of the same tensors would leave.

    Args:
        read: gives boxes of the Hugging Face tensors, always the same ones.
        dtype: the trainer's parameter dtype.
    """
    outcome = Outcome()
    trainer = _Trainer(layout, read, dtype)
    ranks = [_EngineSide(tp, found, plan, layout, read, dtype, outcome) for tp, found in enumerate(engine)]
    uses = Counter(use for parcel in plan.parcels for use in _uses(parcel))
    for tag, parcel in enumerate(plan.parcels):
        message = torch.full((parcel.nbytes,), POISON, dtype=torch.uint8)
        shards, target = trainer.rank(parcel.source), ranks[parcel.target]
        misfits = [*_misfits(parcel, shards), *target.misfits(parcel)]
        outcome.problems.extend(misfits)
        if not misfits:
            torch._foreach_copy_(*packing(parcel, message, shards))
            target.take(tag, message)
        held = message.nbytes + trainer.nbytes + sum(rank.nbytes for rank in ranks)
        outcome.peak_bytes = max(outcome.peak_bytes, held)
        target.settle(parcel)
        for use in _uses(parcel):
            uses[use] -= 1
            if not uses[use]:
                trainer.rank(use[0]).pop(use[1], None)
    for rank in ranks:
        rank.settle_rest()
    _compare_assembled(layout, read, dtype, outcome)
    return outcome


def _uses(parcel: Parcel) -> Iterator[tuple[int, str]]:
    """(trainer rank, parameter) of each piece in a parcel."""
    return ((parcel.source, piece.param) for region in parcel.regions for piece in region.sources)


def _misfits(parcel: Parcel, shards: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
    """Pieces of a parcel that its sender does not hold."""
    for region in parcel.regions:
        for piece in region.sources:
            found = box_of(shards[piece.param], piece.param_box).numel()
            if found != piece.hf_box.rows * piece.hf_box.cols:
                what = f"{piece.param} has no box {tuple(piece.param_box)}"
                yield Problem(piece.hf_name, f"trainer rank {parcel.source}", what)


class _TrainerRank(dict[str, torch.Tensor]):
    """Parameters of one trainer rank; each is filled from the checkpoint when it is asked for."""

    def __init__(self, layout: Layout, rank: int, read: Read, dtype: str) -> None:
        super().__init__()
        self._layout = layout
        self._shapes = layout.params(rank)
        self._pieces = pieces_by_param(layout, rank)
        self._read = read
        self._dtype = dtype

    def __missing__(self, param: str) -> torch.Tensor:
        pieces = self._pieces[param]
        dtype = getattr(torch, self._layout.hf_dtype(pieces[0].hf_name, self._dtype))
        self[param] = fill_param(self._shapes[param], pieces, self._read, dtype)
        return self[param]


class _Trainer:
    def __init__(self, layout: Layout, read: Read, dtype: str) -> None:
        self._made_of = layout, read, dtype
        self._ranks: dict[int, _TrainerRank] = {}

    def rank(self, rank: int) -> _TrainerRank:
        if rank not in self._ranks:
            layout, read, dtype = self._made_of
            self._ranks[rank] = _TrainerRank(layout, rank, read, dtype)
        return self._ranks[rank]

    @property
    def nbytes(self) -> int:
        return sum(param.nbytes for rank in self._ranks.values() for param in rank.values())

    def forget(self) -> None:
        for rank in self._ranks.values():
            rank.clear()


class _Live(dict[str, torch.Tensor]):
    """Engine parameters as flat tensors, poisoned when they are first asked for."""

    def __init__(self, rank: EngineRank) -> None:
        super().__init__()
        self._rank = rank

    def __missing__(self, param: str) -> torch.Tensor:
        live = torch.empty(self._rank.sizes[param], dtype=getattr(torch, self._rank.dtypes[param]))
        live.view(torch.uint8).fill_(POISON)
        self[param] = live
        return live


class _EngineSide:
    """One engine rank: takes parcels in, and judges each parameter when its last parcel has come."""

    def __init__(
        self, tp: int, rank: EngineRank, plan: ShardPlan, layout: Layout, read: Read, dtype: str, outcome: Outcome
    ) -> None:
        self._where = f"engine rank {tp}"
        self._rank = rank
        self._layout = layout
        self._read = read
        self._dtype = dtype
        self._outcome = outcome
        self._live = _Live(rank)
        # How often each element was written, by parameter.
        self._written: dict[str, torch.Tensor] = {}
        program = Program({"digest": "", "fills": [rank.fills], "parcels": [receive_program(plan, tp)]}, 0)
        self._inbound: dict[int, Inbound] = {parcel.tag: parcel for parcel in program.parcels}
        self._left = Counter(place.param for parcel in program.parcels for place in parcel.places)
        self._slots: dict[str, list[Slot]] = defaultdict(list)
        self._fills: dict[str, list[Fill]] = defaultdict(list)
        for slot in rank.slots:
            self._slots[slot.param].append(slot)
        for fill in program.fills:
            self._fills[fill.param].append(fill)
        self._judged: set[str] = set()

    @property
    def nbytes(self) -> int:
        held = (*self._live.values(), *self._written.values())
        return sum(tensor.nbytes for tensor in held)

    def misfits(self, parcel: Parcel) -> Iterator[Problem]:
        """Regions of a parcel that do not fit into this rank's parameters."""
        for slot in (region.slot for region in parcel.regions):
            last, size = _last(slot), self._rank.sizes[slot.param]
            if last >= size:
                what = f"is sent to elements up to {last} of {slot.param}, which has {size}"
                yield Problem(slot.hf_name, self._where, what)

    @torch.no_grad()
    def take(self, tag: int, message: torch.Tensor) -> None:
        """Writes a message where this rank's program says."""
        inbound = self._inbound[tag]
        for target, source in inbound.slots(message, self._live):
            target.copy_(source)
        for place in inbound.places:
            counts = place.of(self._counts(place.param))
            counts.add_(counts < MOST_WRITES)

    def settle(self, parcel: Parcel) -> None:
        """Judges and frees the parameters for which nothing more comes."""
        for region in parcel.regions:
            self._left[region.slot.param] -= 1
            if not self._left[region.slot.param]:
                self._judge(region.slot.param)

    def settle_rest(self) -> None:
        """Judges the parameters that no parcel, or not every one, has reached."""
        for param in self._rank.sizes.keys() - self._judged:
            self._judge(param)

    def _counts(self, param: str) -> torch.Tensor:
        if param not in self._written:
            self._written[param] = torch.zeros(self._rank.sizes[param], dtype=torch.uint8)
        return self._written[param]

    @torch.no_grad()
    def _judge(self, param: str) -> None:
        live, counts = self._live[param], self._counts(param)
        for fill in self._fills[param]:
            # After the parcels, as a commit does it.
            Place(*fill[:-1]).of(live).fill_(fill.value)
        loaded = torch.zeros_like(counts)
        for slot in self._slots[param]:
            place = _place(slot)
            self._judge_slot(slot, place.of(live), place.of(counts))
            place.of(loaded).fill_(1)
        stray = int((counts.bool() & ~loaded.bool()).sum())
        if stray:
            self._complain(param, f"{stray} elements are sent to that a load does not write")
        for fill in self._fills[param]:
            Place(*fill[:-1]).of(loaded).fill_(1)
        if untouched := int((loaded == 0).sum()):
            self._outcome.untouched[param] += untouched
        self._live.pop(param)
        self._written.pop(param)
        self._judged.add(param)

    def _judge_slot(self, slot: Slot, live: torch.Tensor, counts: torch.Tensor) -> None:
        fewest, most = int(counts.min()), int(counts.max())
        if (fewest, most) != (1, 1):
            times = f"{fewest} times" if fewest == most else f"{fewest} to {most} times"
            self._complain(slot.hf_name, f"its elements in {slot.param} are written {times} instead of once")
        wire = getattr(torch, self._layout.hf_dtype(slot.hf_name, self._dtype))
        expected = self._read(slot.hf_name, slot.hf_box).to(wire).to(live.dtype).view(live.shape)
        different = _different(live, expected)
        if different:
            self._complain(
                slot.hf_name, f"{different} of {expected.numel()} elements in {slot.param} differ from a load's"
            )

    def _complain(self, tensor: str, what: str) -> None:
        self._outcome.problems.append(Problem(tensor, self._where, what))


def _compare_assembled(layout: Layout, read: Read, dtype: str, outcome: Outcome) -> None:
    """Puts each Hugging Face tensor together from the trainer's shards, as an export does, and compares it."""
    trainer = _Trainer(layout, read, dtype)
    for pp in range(layout.topology.pipeline):
        for item in layout.placed(pp):
            if item.copy:
                continue
            for name, _ in item.tensors:
                whole = assemble(name, layout, trainer.rank)
                outcome.peak_bytes = max(outcome.peak_bytes, whole.nbytes + trainer.nbytes)
                expected = _whole_tensor(name, layout, read).to(whole.dtype)
                different = _different(whole, expected)
                if different:
                    what = f"{different} of {whole.numel()} elements differ when shards are put together"
                    outcome.problems.append(Problem(name, "trainer", what))
            trainer.forget()


def _whole_tensor(name: str, layout: Layout, read: Read) -> torch.Tensor:
    """A Hugging Face tensor in its own shape."""
    shape = layout.hf_tensors[name]
    return read(name, Box(0, shape[0], 0, (*shape, 1)[1])).view(shape)


def _place(slot: Slot) -> Place:
    return Place(slot.param, slot.offset, slot.hf_box.rows, slot.hf_box.cols, slot.row_stride, slot.col_stride)


def _last(slot: Slot) -> int:
    """The last element of its parameter that a slot has."""
    return slot.offset + (slot.hf_box.rows - 1) * slot.row_stride + (slot.hf_box.cols - 1) * slot.col_stride


def _different(one: torch.Tensor, other: torch.Tensor) -> int:
    """Elements whose bits are not the same."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return int((one.contiguous().view(words) != other.contiguous().view(words)).sum())
