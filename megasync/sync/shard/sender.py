"""The trainer rank's side of a shard-to-shard sync: pack what this rank owes each engine rank, and send it.

Each server has links and a thread of its own, so one that is slow delays no other. A bucket is packed and digested once
for all servers that keep pace; what is contiguous in a parameter is sent from there. Needs memory for two buckets, for
two more with each server that falls behind, and with deltas a host copy of what was sent last.

What goes wrong with one server closes its links alone and is reported at the end. A failure of this rank closes all of
its links before it is raised. The next `send` makes the missing ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from megasync.base.store import join_store, open_store
from megasync.errors import SyncError, raised_as
from megasync.layout.digest import MASK, combine, digest, signed
from megasync.layout.engine_layout import EngineRank
from megasync.layout.shards import box_of, piece_of
from megasync.sync.attempt import timed
from megasync.sync.groups import Deadline, PeerGroup, Transfer
from megasync.sync.messages import (
    CONFIRMED,
    CONFIRMED_WORDS,
    DELTA,
    FULL,
    TABLE,
    BucketHeader,
    Confirmation,
    SendReport,
    SendRequest,
    SentDigest,
    ServerLinks,
)
from megasync.sync.shard import delta
from megasync.sync.shard.plan import ShardBucket, ShardPlan, plan_shards
from megasync.sync.shared_memory import make_links
from megasync.sync.stream import Shards

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megasync.device import Device

log = logging.getLogger(__name__)


class ShardSender:
    """One trainer rank's part in every shard-to-shard sync.

    Args:
        shards: read at each `send`.
        bucket_bytes: largest message.
        host: address of this rank; it listens there and nowhere else.
        backend: of the links; that of the device by default.
    """

    def __init__(self, shards: Shards, bucket_bytes: int, device: Device, host: str, backend: str = "") -> None:
        self._shards = shards
        self._rank = shards.rank
        self._topology = shards.layout.topology
        self._params = shards.params
        self._device = device
        self._host = host
        self._backend = backend or device.backend
        self._bucket_bytes = bucket_bytes
        self._plans: dict[str, ShardPlan] = {}
        # The meeting point, on rank 0 only.
        self._store: Store | None = None
        self._links: dict[str, PeerGroup] = {}
        self._buffers: list[_Buffer] = []
        # By plan: the attempt whose weights `_sent` holds, and those weights by tag.
        self._base: dict[str, str] = {}
        self._sent: dict[str, dict[int, torch.Tensor]] = {}

    def listen(self, timeout: float) -> tuple[str, int] | None:
        """Opens the meeting point of all links; (host, port) on rank 0, None on every other rank."""
        self.leave()
        if self._rank != 0:
            return None
        self._store = open_store(self._host, timeout)
        return self._host, self._store.port

    def prepare(self, name: str, ranks: Sequence[EngineRank], shares: Sequence[int], replicas: Sequence[int]) -> str:
        """Plans the transfer into a server, given what each of its ranks keeps and what each replica's share is.

        Returns the plan's digest, or "" on a rank of none of the ``replicas``, which does not need the plan.
        """
        if self._topology.replica_of(self._rank) not in replicas:
            return ""
        if name not in self._plans:
            layout = self._shards.layout.with_replicas(len(shares))
            self._plans[name] = plan_shards(layout, ranks, self._bucket_bytes, self._shards.dtype, shares)
        return self._plans[name].digest

    def send(self, request: SendRequest) -> SendReport:
        """Sends the present weights to the servers of the request that this rank feeds.

        Raises SyncError when this rank itself failed; it has then left all links.
        """
        start = time.monotonic()
        self._close([name for name in self._links if name not in request.links])
        # In this thread, which has selected the device; those of the servers have not.
        sending = _Sending(request, Deadline(request.timeout), self._device.torch_device)
        try:
            lanes = [lane for server in request.servers if (lane := self._lane_to(server, sending))]
            for lane in lanes:
                self._base.pop(lane.server.plan, None)
            with ThreadPoolExecutor(max(1, len(lanes)), "megasync-send") as pool:
                with timed(sending.seconds, "join"):
                    joined = list(pool.map(lambda lane: self._attempt(self._join, lane), lanes))
                # Nothing is sent before, because making links may wait for whatever the device is doing.
                ready = [lane for lane, done in zip(lanes, joined, strict=True) if done]
                list(pool.map(lambda lane: self._attempt(self._serve, lane), ready))
        except Exception as error:
            self.leave()
            raise SyncError(f"trainer rank {self._rank} failed to send {request.attempt}: {error}") from error
        for lane in lanes:
            self._sent.pop(lane.server.plan, None)
        self._sent |= sending.kept
        self._base |= dict.fromkeys(sending.kept, request.attempt)
        sending.seconds["total"] = time.monotonic() - start
        return sending.report()

    def _lane_to(self, server: ServerLinks, sending: _Sending) -> _Lane | None:
        """Returns the lane to a server, or None if this rank sends it nothing."""
        source = self._topology.local_rank(server.replicas, self._rank)
        if source is None or not (buckets := self._plans[server.plan].of_source(source)):
            return None
        base = sending.request.bases.get(server.plan, "")
        if base and base != self._base.get(server.plan):
            raise SyncError(f"deltas build on attempt {base!r}, which this rank has not kept")
        before = self._sent[server.plan] if base else None
        return _Lane(server, self._plans[server.plan], source, buckets, before, self._links, sending)

    def _attempt(self, step: Callable[[_Lane], None], lane: _Lane) -> bool:
        """Takes a step with one server; whether it succeeded. A broken link is noted and closed."""
        try:
            if lane.sending.device.type == "cuda":
                torch.cuda.set_device(lane.sending.device)
            step(lane)
        except _LinkError as error:
            lane.sending.failed[lane.server.url] = str(error)
            self._close([lane.server.name])
            return False
        return True

    def _join(self, lane: _Lane) -> None:
        """Makes the links to one server, unless they were made for an earlier attempt."""
        server, plan, sending = lane.server, lane.plan, lane.sending
        if server.name in self._links:
            return
        index, size = plan.sources.index(lane.source), len(plan.sources) + plan.engine_ranks
        with raised_as(_LinkError, f"no links to {server.url}", of=(RuntimeError, SyncError)):
            timeout = min(sending.request.join, sending.deadline.left().total_seconds())
            # A store of its own, because a wait in one blocks every other use of it.
            store = join_store(*sending.request.meeting_point, timeout)
            self._links[server.name] = make_links(
                store, server.name, index, size, self._backend, self._host, timeout, sending.device
            )

    def _serve(self, lane: _Lane) -> None:
        """Sends one server everything. A bucket is packed while others are on the wire."""
        sending = lane.sending
        packed_bytes = max((bucket.nbytes for _, bucket in lane.buckets if not self._sent_in_place(bucket)), default=0)
        try:
            for tag, bucket in lane.buckets:
                if sending.ended:
                    break
                in_place = self._sent_in_place(bucket)
                lane.make_room(packed=not in_place)
                with timed(lane.seconds, "pack"):
                    parcel = self._parcel(lane, tag, bucket, 0 if in_place else packed_bytes)
                lane.send(parcel)
            else:
                lane.finish()
        except _LinkError:
            raise
        except BaseException:
            sending.ended = True
            raise
        finally:
            lane.abandon()
            sending.add(lane)

    # Packing

    def _parcel(self, lane: _Lane, tag: int, bucket: ShardBucket, packed_bytes: int) -> _Parcel:
        """The message of a bucket, which stays as it is until it is released.

        It is packed into a buffer of ``packed_bytes``, or, with 0, stays in its parameter.
        """
        sending, plan = lane.sending, lane.server.plan
        if not packed_bytes:
            parcel = _Parcel(tag, bucket, self._part(bucket))
        else:
            key = (sending.request.attempt, plan, lane.source, tag)
            with sending.packing:
                buffer = next((buffer for buffer in self._buffers if buffer.holds == key), None)
                if buffer is None:
                    buffer = self._free_buffer(packed_bytes, sending.device)
                    buffer.holds = None
                    buffer.pack(bucket, self._params)
                    buffer.holds = key
                buffer.users += 1
            parcel = _Parcel(tag, bucket, buffer.memory[: bucket.nbytes], buffer)
        if sending.request.keep:
            with sending.packing:
                kept = sending.kept[plan]
                if tag not in kept:
                    kept[tag] = parcel.message.to("cpu", copy=True)
        return parcel

    def _free_buffer(self, nbytes: int, device: torch.device) -> _Buffer:
        """The buffer that was used longest ago, of those of that size that nobody uses; a new one if there is none."""
        self._buffers = [buffer for buffer in self._buffers if buffer.users or buffer.memory.numel() >= nbytes]
        free = next((buffer for buffer in self._buffers if not buffer.users), None)
        if free is None:
            free = _Buffer(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        else:
            self._buffers.remove(free)
        self._buffers.append(free)
        return free

    def _sent_in_place(self, bucket: ShardBucket) -> bool:
        """Whether the parameter's own memory is the message; its dtype may differ from that on the wire."""
        if not bucket.direct:
            return False
        param = self._params[bucket.regions[0].sources[0].param]
        return param.is_contiguous() and param.dtype == getattr(torch, bucket.dtype)

    def _part(self, bucket: ShardBucket) -> torch.Tensor:
        """The message of a direct bucket, [nbytes] uint8, where its parameter keeps it."""
        piece = bucket.regions[0].sources[0]
        return piece_of(self._params[piece.param].detach(), piece).view(-1).view(torch.uint8)

    def leave(self, names: Iterable[str] | None = None) -> None:
        """Leaves the links of these names, or all links and the meeting point. May be called at any time."""
        if names is None:
            self._store = None
        self._close([name for name in self._links if names is None or name in names])

    def _close(self, names: Sequence[str]) -> None:
        for name in names:
            if (link := self._links.pop(name, None)) is not None:
                try:
                    link.close()
                except (RuntimeError, ValueError) as error:
                    log.warning("Trainer rank %d could not close its links: %s", self._rank, error)


def packing(
    bucket: ShardBucket, message: torch.Tensor, params: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The copies that pack a bucket: rectangles of its message [nbytes] uint8, and the same ones of parameters."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    values, start = message.view(getattr(torch, bucket.dtype)), 0
    for region in bucket.regions:
        box = region.slot.hf_box
        area = values[start : start + region.elements].view(box.rows, box.cols)
        for piece in region.sources:
            source = piece_of(params[piece.param], piece)
            inside = piece.hf_box._replace(row=piece.hf_box.row - box.row, col=piece.hf_box.col - box.col)
            targets.append(box_of(area, inside).view_as(source))
            sources.append(source)
        start += region.elements
    return targets, sources


class _LinkError(SyncError):
    """The links to one server failed; this rank and its other links are sound."""


@dataclass(eq=False)
class _Buffer:
    """Memory for packed buckets: what it ``holds`` now, and how many messages are being sent from it."""

    memory: torch.Tensor
    holds: tuple[object, ...] | None = None
    users: int = 0
    copies: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)

    @torch.no_grad()
    def pack(self, bucket: ShardBucket, params: Mapping[str, torch.Tensor]) -> None:
        message = self.memory[: bucket.nbytes]
        if id(bucket) not in self.copies:
            self.copies[id(bucket)] = packing(bucket, message, params)
        # The digest includes the padding.
        message[bucket.elements * getattr(torch, bucket.dtype).itemsize :] = 0
        torch._foreach_copy_(*self.copies[id(bucket)])  # pyright: ignore[reportPrivateImportUsage] - no public name


@dataclass(frozen=True)
class _Parcel:
    """A bucket's message [nbytes] uint8, in ``buffer`` if it was packed."""

    tag: int
    bucket: ShardBucket
    message: torch.Tensor
    buffer: _Buffer | None = None


@dataclass
class _Sending:
    """One `send` in progress, and what it reports at the end. Its threads share it."""

    request: SendRequest
    deadline: Deadline
    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("join", "pack", "wire", "confirm"), 0.0))
    confirmed: list[Confirmation] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    # This rank has failed, so no server gets the rest.
    ended: bool = False
    # By plan and source, then by engine rank and tag.
    digests: dict[tuple[str, int], dict[int, dict[int, int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    # By plan, copies of all that was sent.
    kept: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Of the buffers.
    packing: threading.Lock = field(default_factory=threading.Lock)

    def left(self) -> timedelta:
        """The limit of the next wait for a message."""
        return min(self.deadline.left(), timedelta(seconds=self.request.stall))

    def digest(self, lane: _Lane, parcel: _Parcel) -> int:
        """The digest of a bucket, computed once for all servers."""
        with self.lock:
            values = self.digests[lane.server.plan, lane.source][parcel.bucket.target]
            if parcel.tag not in values:
                values[parcel.tag] = digest(parcel.message)
            return values[parcel.tag]

    def release(self, parcel: _Parcel | None) -> None:
        """The message has left, or never will."""
        if parcel is not None and parcel.buffer is not None:
            with self.packing:
                parcel.buffer.users -= 1

    def add(self, lane: _Lane) -> None:
        """Adds what was done for one server; of times the longest."""
        with self.lock:
            self.bytes += lane.bytes
            self.confirmed.extend(lane.confirmed)
            for activity, seconds in lane.seconds.items():
                self.seconds[activity] = max(self.seconds[activity], seconds)

    def report(self) -> SendReport:
        digests = tuple(
            SentDigest(plan, source, tp, combine(values))
            for (plan, source), by_rank in self.digests.items()
            for tp, values in by_rank.items()
        )
        return SendReport(digests, tuple(self.confirmed), self.failed, self.seconds, self.bytes)


class _Lane:
    """The messages from this rank, ``source`` of the ``plan``, to one server, in the order of the plan.

    ``before`` has what deltas build on, by tag, ``links`` all links of this rank by their names, once they are made.
    """

    def __init__(
        self,
        server: ServerLinks,
        plan: ShardPlan,
        source: int,
        buckets: list[tuple[int, ShardBucket]],
        before: dict[int, torch.Tensor] | None,
        links: Mapping[str, PeerGroup],
        sending: _Sending,
    ) -> None:
        self.server, self.plan, self.source, self.buckets, self.sending = server, plan, source, buckets, sending
        self._before, self._all_links = before, links
        self._headers = sending.request.stream or before is not None
        self._in_flight: deque[tuple[_Parcel | None, list[tuple[Transfer, torch.Tensor]]]] = deque()
        self._latest: Transfer | None = None
        self.seconds: dict[str, float] = dict.fromkeys(("pack", "wire", "confirm"), 0.0)
        self.confirmed: list[Confirmation] = []
        self.bytes = 0

    @property
    def links(self) -> PeerGroup:
        return self._all_links[self.server.name]

    def make_room(self, packed: bool) -> None:
        """Waits until another message, ``packed`` or not, may be started."""
        while len(self._in_flight) >= self.links.window or (
            packed and sum(parcel is not None and parcel.buffer is not None for parcel, _ in self._in_flight) > 1
        ):
            self._wait_for_oldest()

    def send(self, parcel: _Parcel) -> None:
        """Starts to send a bucket, which is released once it has left."""
        number, payload = 2 * parcel.tag + 1, parcel.message
        if self._headers:
            value = self.sending.digest(self, parcel)
            before = self._before[parcel.tag] if self._before is not None else None
            header, payload = _encode(parcel, before, value)
            ahead = torch.tensor(header, dtype=torch.int64, device=payload.device)
            self._start(parcel, parcel.bucket.target, [(2 * parcel.tag, ahead), (number, payload)])
        else:
            self._start(parcel, parcel.bucket.target, [(number, payload)])
            # While the bucket is on the wire.
            self.sending.digest(self, parcel)
        self.bytes += payload.numel()

    def finish(self) -> None:
        """Sends the tables of digests, waits until everything has left, and receives the confirmations."""
        if not self._headers:
            for tp in sorted({bucket.target for _, bucket in self.buckets}):
                values = self.sending.digests[self.server.plan, self.source][tp]
                table = torch.tensor([signed(values[tag]) for tag in sorted(values)], device=self.sending.device)
                self._start(None, tp, [(TABLE, table)])
        while self._in_flight:
            self._wait_for_oldest()
        if not self.sending.request.stream:
            with timed(self.seconds, "confirm"):
                self._await_confirmations()

    def _start(self, parcel: _Parcel | None, tp: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        to = len(self.plan.sources) + tp
        works: list[tuple[Transfer, torch.Tensor]] = []
        self._in_flight.append((parcel, works))
        with self._failing(parcel):
            for number, part in parts:
                if self._latest is not None and self.links.one_at_a_time:
                    with timed(self.seconds, "wire"):
                        self._latest.wait(self.sending.left())
                self._latest = self.links.send(part, to, number)
                works.append((self._latest, part))

    def _wait_for_oldest(self) -> None:
        """Waits until the oldest message has left; its tensors live until then."""
        parcel, works = self._in_flight[0]
        with timed(self.seconds, "wire"), self._failing(parcel):
            for work, _ in works:
                work.wait(self.sending.left())
        self._in_flight.popleft()
        self.sending.release(parcel)

    def abandon(self) -> None:
        """Releases what is in flight, after a failure."""
        for parcel, _ in self._in_flight:
            self.sending.release(parcel)

    @contextmanager
    def _failing(self, parcel: _Parcel | None) -> Iterator[None]:
        """Turns the failure of a message into that of the link."""
        try:
            yield
        except (RuntimeError, SyncError) as error:
            what = "table of digests" if parcel is None else f"bucket {parcel.tag}"
            raise _LinkError(f"{what} to {self.server.url}: {error}") from error

    def _await_confirmations(self) -> None:
        """Receives which engine ranks hold the complete version. The driver polls those that do not confirm."""
        url, first = self.server.url, len(self.plan.sources)
        for tp in self.plan.confirmed_to(self.source):
            words = torch.zeros(CONFIRMED_WORDS, dtype=torch.int64, device=self.sending.device)
            try:
                self.links.receive(words, first + tp, CONFIRMED).wait(self.sending.left())
            except (RuntimeError, SyncError) as error:
                log.warning("Rank %d of %s did not confirm %s: %s", tp, url, self.sending.request.attempt, error)
                continue
            value, microseconds = words.tolist()
            self.confirmed.append(Confirmation(url, tp, value & MASK, microseconds / 1e6))


def _encode(parcel: _Parcel, before: torch.Tensor | None, value: int) -> tuple[BucketHeader, torch.Tensor]:
    """(header, payload): a delta against ``before`` when there is one and it is smaller, else the bucket."""
    packed, bucket = parcel.message, parcel.bucket
    if before is not None:
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        new, old = (message.view(dtype)[: bucket.elements] for message in (packed, before.to(packed.device)))
        if encoded := delta.encode(new, old):
            payload, changed = encoded
            return BucketHeader(DELTA, payload.numel(), changed, signed(value)), payload
    return BucketHeader(FULL, packed.numel(), bucket.elements, signed(value)), packed
