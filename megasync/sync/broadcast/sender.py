"""The trainer's side of transports that move whole tensors: gather a pipeline stage's buckets and deliver them.

Every trainer rank has a `StageSender`. The first rank of each pipeline stage packs the buckets and delivers them. Its
peers in the plan (of the dense layers its tensor-parallel ones, of experts also data-parallel ones) hand it their
pieces over a private group; the other ranks have nothing to do. The subclass says how a bucket is delivered:
`BroadcastSender` broadcasts it to all servers at once, in a group in which the sender is rank 0 and the servers' ranks
follow.

Two buckets of memory, allocated when the ranks join and reused, plus one peer's contribution: bucket i + 1 is packed
while bucket i is delivered. A run over all buckets has one deadline. Any failure closes this rank's groups before it is
raised, which wakes the processes that wait for this rank.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

import torch

from megasync.base.store import join_store, open_store
from megasync.errors import SyncError
from megasync.layout.shards import box_of
from megasync.sync.attempt import timed
from megasync.sync.broadcast.plan import ITEM_BYTES, BroadcastPlan, Bucket, group_name
from megasync.sync.groups import Deadline, SyncGroup
from megasync.sync.stream import Shards, held_piece, pack_part, piece_elements, place_part

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megasync.device import Device

log = logging.getLogger(__name__)

# A rank that only noticed a broken connection delays its report, so that the rank that broke it reports first.
ECHO_SECONDS = 0.5


class ConnectionLost(SyncError):
    """An exchange with another process did not finish."""


class StageSender(ABC):
    """One trainer rank's part in gathering its stage's buckets on the stage's first rank and delivering them.

    Args:
        plan: the same on every rank and in the driver.
        shards: read at each run, cast to the bucket's dtype while packing.
        host: address of this rank that peers and servers can reach; the sender listens there and nowhere else.

    Raises SyncError when the parameters are not those of the layout.
    """

    # The name of `_deliver` in the seconds that a run returns.
    activity: str

    def __init__(self, plan: BroadcastPlan, shards: Shards, device: Device, host: str = "127.0.0.1") -> None:
        rank, stage = shards.rank, shards.layout.topology.coords(shards.rank).pp
        _check_params(shards)
        self._plan = plan
        self._shards = shards
        self._rank = rank
        self._stage = stage
        self._members = plan.members(stage)
        self._takes_part = rank in self._members
        self._sends = rank == self._members[0]
        self._buckets = plan.of_stage(stage) if self._takes_part else ()
        self._device = device
        self._host = host
        self._store: Store | None = None
        self._groups: dict[str, SyncGroup] = {}
        self._buffers: list[torch.Tensor] = []
        self._staging: torch.Tensor | None = None

    def listen(self, timeout: float) -> tuple[str, int] | None:
        """Opens the meeting point of this rank's stage; (host, port) on the sender, None on every other rank."""
        self.leave()
        if not self._sends:
            return None
        self._store = open_store(self._host, timeout)
        return self._host, self._store.port

    def _join_peers(self, name: str, addresses: Sequence[tuple[str, int] | None], timeout: float) -> None:
        """Joins the group of the stage's peers, and allocates. Raises SyncError when a peer does not join in time.

        ``name`` is the prefix of the group names, unique to this attempt, and ``addresses`` what `listen` returned on
        each rank, in rank order.
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
        assert self._store is not None
        with self._joining(name):
            self._groups[key] = SyncGroup(
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
        def allocate(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)

        others = [rank for rank in self._members if rank != self._rank] if self._sends else [self._rank]
        largest = max((_nbytes(bucket, rank) for bucket in self._buckets for rank in others), default=0)
        self._staging = allocate(largest)
        if self._sends:
            count = min(2, len(self._buckets))
            self._buffers = [allocate(max(bucket.nbytes for bucket in self._buckets)) for _ in range(count)]

    def _run(self, doing: str, timeout: float) -> dict[str, float]:
        """Gathers and delivers all of this stage's buckets, in plan order, within ``timeout`` seconds.

        Returns seconds: ``pack`` (copying and gathering), ``wire`` (handing over), the delivery's own, and ``total``.
        Raises SyncError, which names the rank and what it was ``doing``; this rank has then left its groups.
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
            if isinstance(error, ConnectionLost):
                time.sleep(ECHO_SECONDS)
            raise SyncError(f"trainer rank {self._rank} failed to {doing}: {error}") from error
        return {**seconds, "total": time.monotonic() - start}

    def _deliver_all(self, deadline: Deadline, seconds: dict[str, float]) -> None:
        """Sender: bucket i + 1 is packed by the thread while bucket i is delivered."""

        def packed(index: int) -> torch.Tensor:
            with timed(seconds, "pack"):
                return self._pack(self._buckets[index], self._buffers[index % 2], deadline)

        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="megasync-pack") as packer:
            following = packer.submit(packed, 0)
            for index in range(len(self._buckets)):
                message = following.result()
                if index + 1 < len(self._buckets):
                    following = packer.submit(packed, index + 1)
                with timed(seconds, self.activity):
                    self._deliver(index, message, deadline)

    @abstractmethod
    def _deliver(self, index: int, message: torch.Tensor, deadline: Deadline) -> None:
        """Sender: delivers the bytes of the stage's bucket ``index``, [nbytes] uint8, which are reused afterwards."""

    def _contribute(self, deadline: Deadline, seconds: dict[str, float]) -> None:
        """Peer: hands its pieces of each bucket to the sender, one after another as one message."""
        for bucket in self._buckets:
            if self._rank not in bucket.contributions:
                continue
            assert self._staging is not None
            message = self._staging[: _nbytes(bucket, self._rank)].view(_dtype(bucket))
            with timed(seconds, "pack"):
                pack_part(bucket, self._shards, message)
            with timed(seconds, "wire"), describe_failure("handing over pieces", bucket):
                self._groups["peers"].send(message, 0, deadline)

    @torch.no_grad()
    def _pack(self, bucket: Bucket, buffer: torch.Tensor, deadline: Deadline) -> torch.Tensor:
        """Fills ``buffer`` with a bucket and returns its bytes, [nbytes] uint8."""
        dtype = _dtype(bucket)
        elements = buffer[: bucket.nbytes].view(dtype)
        tensors = {
            entry.name: elements[entry.offset // dtype.itemsize :][: prod(entry.shape)].view(entry.shape)
            for entry in bucket.tensors
        }
        for rank, pieces in bucket.contributions.items():
            if rank == self._rank:
                for piece in pieces:
                    box_of(tensors[piece.hf_name], piece.hf_box).copy_(held_piece(piece, self._shards.params))
                continue
            assert self._staging is not None
            message = self._staging[: _nbytes(bucket, rank)].view(dtype)
            with describe_failure(f"pieces from trainer rank {rank}", bucket):
                self._groups["peers"].receive(message, self._members.index(rank), deadline)
            place_part(bucket, rank, message, tensors)
        return buffer[: bucket.nbytes]

    def leave(self) -> None:
        """Leaves every group and frees the buckets. May be called at any time, more than once."""
        groups, self._groups = self._groups, {}
        self._store, self._staging, self._buffers = None, None, []
        # The group joined last is left first.
        while groups:
            _, group = groups.popitem()
            try:
                group.close()
            except (RuntimeError, ValueError) as error:
                log.warning("Trainer rank %d could not close a sync group: %s", self._rank, error)


class BroadcastSender(StageSender):
    """One trainer rank's part in a weight broadcast."""

    activity = "wire"

    def join(self, name: str, addresses: Sequence[tuple[str, int] | None], engine_ranks: int, timeout: float) -> None:
        """Joins the stage's peers and the servers; call it on every rank while the servers join too.

        Servers join ``<name>-stage<k>`` with ``engine_ranks`` ranks together; for the rest see `_join_peers`.
        """
        self._join_peers(name, addresses, timeout)
        if self._sends:
            self._join_group("engines", name, group_name(name, self._stage), 0, 1 + engine_ranks, timeout)

    def send(self, version: int, timeout: float) -> dict[str, float]:
        """Sends all of this stage's buckets, in plan order, within ``timeout`` seconds.

        Returns seconds by activity: ``pack`` (copying and gathering), ``wire`` (broadcasting), ``total``. Raises
        SyncError, which names rank, bucket and version; this rank has then left its groups.
        """
        return self._run(f"send version {version}", timeout)

    def _deliver(self, index: int, message: torch.Tensor, deadline: Deadline) -> None:
        with describe_failure(f"broadcast of bucket {index + 1} of {len(self._buckets)}", self._buckets[index]):
            self._groups["engines"].broadcast(message, deadline)


def _dtype(bucket: Bucket) -> torch.dtype:
    return getattr(torch, bucket.dtype)


def _nbytes(bucket: Bucket, rank: int) -> int:
    """Bytes of what one rank hands over."""
    return sum(piece_elements(bucket, rank)) * ITEM_BYTES[bucket.dtype]


@contextmanager
def describe_failure(what: str, bucket: Bucket) -> Iterator[None]:
    """Turns a failed exchange into ConnectionLost, which says what failed and in which bucket."""
    try:
        yield
    except (RuntimeError, SyncError) as error:
        names = f"{bucket.tensors[0].name} .. {bucket.tensors[-1].name}"
        raise ConnectionLost(f"{what} ({names}, {bucket.nbytes} bytes): {error}") from error


def _check_params(shards: Shards) -> None:
    """Raises SyncError when the model's parameters are not the layout's."""
    expected = shards.layout.params(shards.rank)
    shapes = {name: tuple(param.shape) for name, param in shards.params.items()}
    wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise SyncError(
            f"the model's parameters differ from the {shards.layout.spec!r} layout in {len(wrong)} names or shapes; "
            f"first: {name}, layout {expected.get(name)}, model {shapes.get(name)}"
        )
