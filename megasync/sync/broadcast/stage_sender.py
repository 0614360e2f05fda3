"""Gathering the buckets of a pipeline stage: what every transport that moves whole tensors does on the trainer's side.

Every trainer rank has a `StageSender`. The first rank of each pipeline stage packs the buckets and delivers them; its
peers in the plan (of the dense layers its tensor-parallel ones, of experts also data-parallel ones) hand it their pieces
over a private group; the other ranks have nothing to do. How a bucket is delivered is the subclass's.

Two buckets of memory, allocated at `join` and reused, plus one peer's contribution: bucket i + 1 is packed while bucket i
is delivered. A run over all buckets has one deadline, and any failure closes this rank's groups before it is raised, so
whoever waits for this rank is woken.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megasync.errors import SyncError
from megasync.layout.layout import Layout, Piece
from megasync.layout.shards import box_of
from megasync.sync.broadcast.plan import ITEM_BYTES, BroadcastPlan, Bucket
from megasync.sync.groups import Deadline, Group, join_store, open_store

if TYPE_CHECKING:
    from megasync.device import Device

log = logging.getLogger(__name__)

# A rank that only noticed a broken connection waits so long before it says so: the rank that broke it speaks first.
ECHO_SECONDS = 0.5


class LostContact(SyncError):
    """An exchange with another process that did not finish."""


class StageSender(ABC):
    """One trainer rank's part in bringing all buckets of its stage to the stage's first rank, and from there on.

    Args:
        plan: the same on every rank and in the driver.
        rank: this trainer rank, global.
        params: live local parameters by name; read at each run, cast to the bucket's dtype while packing.
        host: address of this rank that peers and servers can reach; the sender listens there and nowhere else.

    Raises:
        SyncError: the parameters are not those of the layout.
    """

    # What `_deliver` is called in the seconds that a run returns.
    activity: str

    def __init__(
        self,
        plan: BroadcastPlan,
        layout: Layout,
        rank: int,
        params: Mapping[str, torch.Tensor],
        device: Device,
        host: str = "127.0.0.1",
    ) -> None:
        stage = layout.topology.coords(rank).pp
        _check_params(layout, layout.params(rank), params)
        self._plan = plan
        self._rank = rank
        self._stage = stage
        self._members = plan.members(stage)
        self._takes_part = rank in self._members
        self._sends = rank == self._members[0]
        self._buckets = plan.of_stage(stage) if self._takes_part else ()
        self._params = params
        self._device = device
        self._host = host
        self._store: dist.Store | None = None
        self._groups: dict[str, Group] = {}
        self._buffers: list[torch.Tensor] = []
        self._staging: torch.Tensor | None = None

    def listen(self, timeout: float) -> tuple[str, int] | None:
        """Opens the meeting point of this rank's stage; (host, port) on the sender, None on every other rank."""
        self.leave()
        if not self._sends:
            return None
        self._store = open_store(self._host, timeout)
        return self._host, self._store.port

    def _meet(self, name: str, addresses: Sequence[tuple[str, int] | None], timeout: float) -> None:
        """Meets the stage's peers and allocates.

        Args:
            name: prefix of the group names, unique to this attempt.
            addresses: what `listen` returned on each rank, in rank order.

        Raises:
            SyncError: someone did not come in time.
        """
        if not self._takes_part:
            return
        if self._store is None:
            host, port = addresses[self._members[0]] or ("", 0)
            with self._joining(name):
                self._store = join_store(host, port, timeout)
        if len(self._members) > 1:
            place = self._members.index(self._rank)
            self._join_group("peers", name, f"{name}-stage{self._stage}-gather", place, len(self._members), timeout)
        self._allocate()

    def _join_group(self, key: str, name: str, group: str, place: int, size: int, timeout: float) -> None:
        with self._joining(name):
            self._groups[key] = Group(
                self._store, group, place, size, self._device.backend, timeout, operation_timeout=timeout
            )

    @contextmanager
    def _joining(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.leave()
            raise SyncError(
                f"trainer rank {self._rank} could not join {name} of stage {self._stage}: {error}"
            ) from error

    def _allocate(self) -> None:
        def room(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)

        others = [rank for rank in self._members if rank != self._rank] if self._sends else [self._rank]
        largest = max((_nbytes(bucket, rank) for bucket in self._buckets for rank in others), default=0)
        self._staging = room(largest)
        if self._sends:
            count = min(2, len(self._buckets))
            self._buffers = [room(max(bucket.nbytes for bucket in self._buckets)) for _ in range(count)]

    def _run(self, doing: str, timeout: float) -> dict[str, float]:
        """Gathers and delivers all of this stage's buckets, in plan order, within ``timeout`` seconds.

        Returns:
            Seconds: ``pack`` (copying and gathering), ``wire`` (handing over), the delivery's own, and ``total``.

        Raises:
            SyncError: naming the rank and what it was ``doing``; this rank has then left its groups.
        """
        start, deadline = time.monotonic(), Deadline(timeout)
        seconds = dict.fromkeys(("pack", "wire", self.activity), 0.0)
        try:
            if self._takes_part and self._staging is None:
                raise SyncError("this rank has not joined a group")
            if self._sends:
                self._deliver_all(deadline, seconds)
            elif self._takes_part:
                self._contribute(deadline, seconds)
        except Exception as error:
            self.leave()
            if isinstance(error, LostContact):
                time.sleep(ECHO_SECONDS)
            raise SyncError(f"trainer rank {self._rank} failed to {doing}: {error}") from error
        return {**seconds, "total": time.monotonic() - start}

    def _deliver_all(self, deadline: Deadline, seconds: dict[str, float]) -> None:
        """Sender: bucket i + 1 is packed by the thread while bucket i is delivered."""

        def packed(index: int) -> torch.Tensor:
            with _clock(seconds, "pack"):
                return self._pack(self._buckets[index], self._buffers[index % 2], deadline)

        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="megasync-pack") as packer:
            following = packer.submit(packed, 0)
            for index in range(len(self._buckets)):
                message = following.result()
                if index + 1 < len(self._buckets):
                    following = packer.submit(packed, index + 1)
                with _clock(seconds, self.activity):
                    self._deliver(index, message, deadline)

    @abstractmethod
    def _deliver(self, index: int, message: torch.Tensor, deadline: Deadline) -> None:
        """Sender: passes on the bytes of the stage's bucket ``index``, [nbytes] uint8, which are reused afterwards."""

    def _contribute(self, deadline: Deadline, seconds: dict[str, float]) -> None:
        """Peer: hands its pieces of each bucket to the sender, one message a bucket."""
        for bucket in self._buckets:
            if self._rank not in bucket.contributions:
                continue
            with _clock(seconds, "pack"):
                message = self._collect(bucket)
            with _clock(seconds, "wire"), named("handing over pieces", bucket):
                self._groups["peers"].send(message, 0, deadline)

    @torch.no_grad()
    def _pack(self, bucket: Bucket, buffer: torch.Tensor, deadline: Deadline) -> torch.Tensor:
        """Fills ``buffer`` with a bucket and returns its bytes, [nbytes] uint8."""
        dtype = _dtype(bucket)
        elements = buffer[: bucket.nbytes].view(dtype)
        whole = {
            entry.name: elements[entry.offset // dtype.itemsize :][: prod(entry.shape)].view(entry.shape)
            for entry in bucket.tensors
        }
        for rank, pieces in bucket.contributions.items():
            if rank == self._rank:
                for piece in pieces:
                    box_of(whole[piece.hf_name], piece.hf_box).copy_(self._part(piece))
                continue
            message = self._staging[: _nbytes(bucket, rank)].view(dtype)
            with named(f"pieces from trainer rank {rank}", bucket):
                self._groups["peers"].receive(message, self._members.index(rank), deadline)
            offset = 0
            for piece in pieces:
                target = box_of(whole[piece.hf_name], piece.hf_box)
                target.copy_(message[offset : offset + target.numel()].view(target.shape))
                offset += target.numel()
        return buffer[: bucket.nbytes]

    @torch.no_grad()
    def _collect(self, bucket: Bucket) -> torch.Tensor:
        """This rank's pieces of a bucket behind each other, as one flat tensor."""
        message = self._staging[: _nbytes(bucket, self._rank)].view(_dtype(bucket))
        offset = 0
        for piece in bucket.contributions[self._rank]:
            part = self._part(piece)
            message[offset : offset + part.numel()].view(part.shape).copy_(part)
            offset += part.numel()
        return message

    def _part(self, piece: Piece) -> torch.Tensor:
        return box_of(self._params[piece.param].detach(), piece.param_box)

    def leave(self) -> None:
        """Leaves every group and frees the buckets. May be called at any time, more than once."""
        groups, self._groups = self._groups, {}
        self._store, self._staging, self._buffers = None, None, []
        # What was joined last is left first.
        while groups:
            _, group = groups.popitem()
            try:
                group.close()
            except (RuntimeError, ValueError) as error:
                log.warning("trainer rank %d could not close a sync group: %s", self._rank, error)


def _dtype(bucket: Bucket) -> torch.dtype:
    return getattr(torch, bucket.dtype)


def _nbytes(bucket: Bucket, rank: int) -> int:
    """Bytes of what one rank hands over."""
    elements = sum(piece.hf_box.rows * piece.hf_box.cols for piece in bucket.contributions.get(rank, ()))
    return elements * ITEM_BYTES[bucket.dtype]


@contextmanager
def _clock(seconds: dict[str, float], activity: str) -> Iterator[None]:
    """Adds the time spent inside to one activity."""
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[activity] += time.monotonic() - start


@contextmanager
def named(what: str, bucket: Bucket) -> Iterator[None]:
    """Raises LostContact, which says what failed and in which bucket, for a failed exchange."""
    try:
        yield
    except (RuntimeError, SyncError) as error:
        names = f"{bucket.tensors[0].name} .. {bucket.tensors[-1].name}"
        raise LostContact(f"{what} ({names}, {bucket.nbytes} bytes): {error}") from error


def _check_params(layout: Layout, expected: Mapping[str, tuple[int, ...]], params: Mapping[str, torch.Tensor]) -> None:
    """Raises SyncError when the model's parameters are not the layout's."""
    found = {name: tuple(param.shape) for name, param in params.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise SyncError(
            f"the model's parameters differ from the {layout.spec!r} layout in {len(wrong)} names or shapes; first: "
            f"{name}, layout {expected.get(name)}, model {found.get(name)}"
        )
