"""The trainer rank's side of a shard-to-shard sync: pack what this rank owes each engine rank, and send it.

Each engine has links and a thread of its own, so one that is slow delays no other. A bucket is packed and digested once
for all engines that keep pace; what is contiguous in a parameter is sent from there. Needs memory for two buckets, for
two more with each engine that falls behind, and with deltas a host copy of what was sent last.

What goes wrong with one engine closes its links alone and is reported at the end. A failure of this rank closes all of
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
from megasync.errors import SyncError
from megasync.layout.digest import MASK, combine, digest, signed
from megasync.layout.engine_layout import EngineRank
from megasync.layout.shards import box_of, piece_of
from megasync.sync.attempt import timed
from megasync.sync.groups import Deadline, Links, Transfer
from megasync.sync.messages import (
    CONFIRMED,
    CONFIRMED_WORDS,
    DELTA,
    FULL,
    TABLE,
    BucketHeader,
    Confirmation,
    EngineLinks,
    SendReport,
    SendRequest,
    SentDigest,
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
        self._links: dict[str, Links] = {}
        self._buffers: list[_Buffer] = []
        self._packing = threading.Lock()
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

    def prepare(self, name: str, engine: Sequence[EngineRank], shares: Sequence[int], replicas: Sequence[int]) -> str:
        """Plans the transfer into an engine, given what each of its ranks keeps and what each replica's share is.

        Returns the plan's digest, or "" on a rank of none of the ``replicas``, which does not need the plan.
        """
        if self._topology.replica_of(self._rank) not in replicas:
            return ""
        if name not in self._plans:
            layout = self._shards.layout.with_replicas(len(shares))
            self._plans[name] = plan_shards(layout, engine, self._bucket_bytes, self._shards.dtype, shares)
        return self._plans[name].digest

    def send(self, request: SendRequest) -> SendReport:
        """Sends the present weights to the engines of the request that this rank feeds.

        Raises SyncError when this rank itself failed; it has then left all links.
        """
        start = time.monotonic()
        self._close([name for name in self._links if name not in request.links])
        # In this thread, which has selected the device; those of the engines have not.
        sending = _Sending(request, Deadline(request.timeout), self._device.torch_device)
        try:
            mine = [feed for engine in request.engines if (feed := self._feed_of(engine, sending))]
            for feed in mine:
                self._base.pop(feed.engine.plan, None)
            with ThreadPoolExecutor(max(1, len(mine)), "megasync-send") as pool:
                with timed(sending.seconds, "join"):
                    joined = list(pool.map(lambda feed: self._attempt(self._join, feed, sending), mine))
                # Nothing is sent before, because making links may wait for whatever the device is doing.
                ready = [feed for feed, done in zip(mine, joined, strict=True) if done]
                list(pool.map(lambda feed: self._attempt(self._serve, feed, sending), ready))
        except Exception as error:
            self.leave()
            raise SyncError(f"trainer rank {self._rank} failed to send {request.attempt}: {error}") from error
        for feed in mine:
            self._sent.pop(feed.engine.plan, None)
        self._sent |= sending.kept
        self._base |= dict.fromkeys(sending.kept, request.attempt)
        sending.seconds["total"] = time.monotonic() - start
        return sending.report()

    def _feed_of(self, engine: EngineLinks, sending: _Sending) -> _Feed | None:
        """What this rank sends to an engine, or None."""
        source = self._topology.local_rank(engine.replicas, self._rank)
        if source is None or not (buckets := self._plans[engine.plan].of_source(source)):
            return None
        base = sending.request.bases.get(engine.plan, "")
        if base and base != self._base.get(engine.plan):
            raise SyncError(f"deltas build on attempt {base!r}, which this rank has not kept")
        before = self._sent[engine.plan] if base else None
        packed = max((bucket.nbytes for _, bucket in buckets if not self._sent_in_place(bucket)), default=0)
        return _Feed(engine, self._plans[engine.plan], source, buckets, before, packed)

    def _attempt(self, step: Callable[[_Feed, _Sending], None], feed: _Feed, sending: _Sending) -> bool:
        """Takes a step with one engine; whether it succeeded. A broken link is noted and closed."""
        try:
            if sending.device.type == "cuda":
                torch.cuda.set_device(sending.device)
            step(feed, sending)
        except _LinkError as error:
            sending.failed[feed.engine.url] = str(error)
            self._close([feed.engine.name])
            return False
        return True

    def _join(self, feed: _Feed, sending: _Sending) -> None:
        """Makes the links to one engine, unless they were made for an earlier attempt."""
        engine, plan, request = feed.engine, feed.plan, sending.request
        if engine.name in self._links:
            return
        index, size = plan.sources.index(feed.source), len(plan.sources) + plan.engine_ranks
        try:
            timeout = min(request.join, sending.deadline.left().total_seconds())
            # A store of its own, because a wait in one blocks every other use of it.
            store = join_store(*request.meeting_point, timeout)
            self._links[engine.name] = make_links(
                store, engine.name, index, size, self._backend, self._host, timeout, sending.device
            )
        except (RuntimeError, SyncError) as error:
            raise _LinkError(f"no links to {engine.url}: {error}") from error

    def _serve(self, feed: _Feed, sending: _Sending) -> None:
        """Sends one engine everything. A bucket is packed while others are on the wire."""
        lane = _Lane(feed, self._links[feed.engine.name], sending, self._release)
        try:
            for tag, bucket in feed.buckets:
                if sending.ended:
                    break
                in_place = self._sent_in_place(bucket)
                lane.make_room(packed=not in_place)
                with timed(lane.seconds, "pack"):
                    parcel = self._parcel(feed, tag, bucket, in_place, sending)
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

    def _parcel(self, feed: _Feed, tag: int, bucket: ShardBucket, in_place: bool, sending: _Sending) -> _Parcel:
        """The message of a bucket; it stays as it is until it is released."""
        if in_place:
            parcel = _Parcel(tag, bucket, self._part(bucket))
        else:
            key = (sending.request.attempt, feed.engine.plan, feed.source, tag)
            with self._packing:
                buffer = next((buffer for buffer in self._buffers if buffer.holds == key), None)
                if buffer is None:
                    buffer = self._free_buffer(feed.packed_bytes, sending.device)
                    buffer.holds = None
                    buffer.pack(bucket, self._params)
                    buffer.holds = key
                buffer.users += 1
            parcel = _Parcel(tag, bucket, buffer.memory[: bucket.nbytes], buffer)
        if sending.request.keep:
            with self._packing:
                kept = sending.kept[feed.engine.plan]
                if tag not in kept:
                    kept[tag] = parcel.message.to("cpu", copy=True)
        return parcel

    def _release(self, parcel: _Parcel) -> None:
        if parcel.buffer is not None:
            with self._packing:
                parcel.buffer.users -= 1

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
        whole = values[start : start + region.elements].view(box.rows, box.cols)
        for piece in region.sources:
            source = piece_of(params[piece.param], piece)
            inside = piece.hf_box._replace(row=piece.hf_box.row - box.row, col=piece.hf_box.col - box.col)
            targets.append(box_of(whole, inside).view_as(source))
            sources.append(source)
        start += region.elements
    return targets, sources


class _LinkError(SyncError):
    """The link to one engine failed; this rank and its other links are sound."""


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
class _Feed:
    """What this rank, ``source`` of the ``plan``, sends to one engine.

    ``before`` has what deltas build on, by tag; ``packed_bytes`` is the size of the largest bucket that is packed.
    """

    engine: EngineLinks
    plan: ShardPlan
    source: int
    buckets: list[tuple[int, ShardBucket]]
    before: dict[int, torch.Tensor] | None
    packed_bytes: int


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
    # This rank has failed, so no engine gets the rest.
    ended: bool = False
    # By plan and source, then by engine rank and tag.
    digests: dict[tuple[str, int], dict[int, dict[int, int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    # By plan, copies of all that was sent.
    kept: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def left(self) -> timedelta:
        """The limit of the next wait for a message."""
        return min(self.deadline.left(), timedelta(seconds=self.request.stall))

    def digest(self, feed: _Feed, parcel: _Parcel) -> int:
        """The digest of a bucket, computed once for all engines."""
        with self.lock:
            values = self.digests[feed.engine.plan, feed.source][parcel.bucket.target]
            if parcel.tag not in values:
                values[parcel.tag] = digest(parcel.message)
            return values[parcel.tag]

    def add(self, lane: _Lane) -> None:
        """Adds what was done for one engine; of times the longest."""
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
    """The messages from this rank to one engine, in the order of the plan."""

    def __init__(self, feed: _Feed, links: Links, sending: _Sending, release: Callable[[_Parcel], None]) -> None:
        self._feed = feed
        self._links = links
        self._sending = sending
        self._release = release
        self._headers = sending.request.stream or feed.before is not None
        self._in_flight: deque[tuple[_Parcel | None, list[tuple[Transfer, torch.Tensor]]]] = deque()
        self._latest: Transfer | None = None
        self.seconds: dict[str, float] = dict.fromkeys(("pack", "wire", "confirm"), 0.0)
        self.confirmed: list[Confirmation] = []
        self.bytes = 0

    def make_room(self, packed: bool) -> None:
        """Waits until another message, ``packed`` or not, may be started."""
        while len(self._in_flight) >= self._links.window or (packed and self._packed > 1):
            self._wait_for_oldest()

    @property
    def _packed(self) -> int:
        return sum(parcel is not None and parcel.buffer is not None for parcel, _ in self._in_flight)

    def send(self, parcel: _Parcel) -> None:
        """Starts to send a bucket, which is released once it has left."""
        number, payload = 2 * parcel.tag + 1, parcel.message
        if self._headers:
            value = self._sending.digest(self._feed, parcel)
            before = self._feed.before[parcel.tag] if self._feed.before is not None else None
            header, payload = _encode(parcel, before, value)
            ahead = torch.tensor(header, dtype=torch.int64, device=payload.device)
            self._start(parcel, parcel.bucket.target, [(2 * parcel.tag, ahead), (number, payload)])
        else:
            self._start(parcel, parcel.bucket.target, [(number, payload)])
            # While the bucket is on the wire.
            self._sending.digest(self._feed, parcel)
        self.bytes += payload.numel()

    def finish(self) -> None:
        """Sends the tables of digests, waits until everything has left, and receives the confirmations."""
        if not self._headers:
            for tp in sorted({bucket.target for _, bucket in self._feed.buckets}):
                values = self._sending.digests[self._feed.engine.plan, self._feed.source][tp]
                table = torch.tensor([signed(values[tag]) for tag in sorted(values)], device=self._sending.device)
                self._start(None, tp, [(TABLE, table)])
        while self._in_flight:
            self._wait_for_oldest()
        if not self._sending.request.stream:
            with timed(self.seconds, "confirm"):
                self._await_confirmations()

    def _start(self, parcel: _Parcel | None, tp: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        to = len(self._feed.plan.sources) + tp
        works: list[tuple[Transfer, torch.Tensor]] = []
        self._in_flight.append((parcel, works))
        with self._failing(parcel):
            for number, part in parts:
                if self._latest is not None and self._links.one_at_a_time:
                    with timed(self.seconds, "wire"):
                        self._latest.wait(self._sending.left())
                self._latest = self._links.send(part, to, number)
                works.append((self._latest, part))

    def _wait_for_oldest(self) -> None:
        """Waits until the oldest message has left; its tensors live until then."""
        parcel, works = self._in_flight[0]
        with timed(self.seconds, "wire"), self._failing(parcel):
            for work, _ in works:
                work.wait(self._sending.left())
        self._in_flight.popleft()
        if parcel:
            self._release(parcel)

    def abandon(self) -> None:
        """Releases what is in flight, after a failure."""
        for parcel, _ in self._in_flight:
            if parcel:
                self._release(parcel)

    @contextmanager
    def _failing(self, parcel: _Parcel | None) -> Iterator[None]:
        """Turns the failure of a message into that of the link."""
        try:
            yield
        except (RuntimeError, SyncError) as error:
            what = "table of digests" if parcel is None else f"bucket {parcel.tag}"
            raise _LinkError(f"{what} to {self._feed.engine.url}: {error}") from error

    def _await_confirmations(self) -> None:
        """Receives which engine ranks hold the complete version. The driver polls those that do not confirm."""
        url, first = self._feed.engine.url, len(self._feed.plan.sources)
        for tp in self._feed.plan.confirmed_to(self._feed.source):
            words = torch.zeros(CONFIRMED_WORDS, dtype=torch.int64, device=self._sending.device)
            try:
                self._links.receive(words, first + tp, CONFIRMED).wait(self._sending.left())
            except (RuntimeError, SyncError) as error:
                log.warning("Rank %d of %s did not confirm %s: %s", tp, url, self._sending.request.attempt, error)
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
