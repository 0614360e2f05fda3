"""The trainer rank's side of a shard-to-shard sync: pack what this rank owes each engine rank, and send it.

Engines that keep the same rectangles are of one kind. For each kind a bucket is packed and digested once and sent to
every engine of it, while the next one is packed. What is contiguous in a parameter is sent from there. Needs memory for
two buckets, and with deltas a host copy of what was sent last.

A failure closes this rank's links before it is raised; the next `send` makes new ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from megasync.errors import SyncError
from megasync.layout.digest import MASK, digest, signed
from megasync.layout.engine_layout import EngineRank
from megasync.layout.shards import box_of
from megasync.sync.attempt import timed
from megasync.sync.groups import Deadline, Links, Transfer, join_store, open_store
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
    """

    def __init__(self, shards: Shards, bucket_bytes: int, device: Device, host: str) -> None:
        self._shards = shards
        self._rank = shards.rank
        self._params = shards.params
        self._device = device
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._plans: dict[str, ShardPlan] = {}
        self._store: Store | None = None
        self._links: dict[str, Links] = {}
        self._buffers: list[torch.Tensor] = []
        self._copies: dict[tuple[str, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        # By kind of engine: the attempt whose weights `_sent` holds, and those weights by tag.
        self._base: dict[str, str] = {}
        self._sent: dict[str, dict[int, torch.Tensor]] = {}

    def listen(self, timeout: float) -> tuple[str, int] | None:
        """Opens the meeting point of all links; (host, port) on rank 0, None on every other rank."""
        self.leave()
        if self._rank != 0:
            return None
        self._store = open_store(self._host, timeout)
        return self._host, self._store.port

    def prepare(self, kind: str, engine: Sequence[EngineRank]) -> str:
        """Plans the transfer into one kind of engine, given what each of its ranks keeps; the plan's digest."""
        if kind not in self._plans:
            self._plans[kind] = plan_shards(self._shards.layout, engine, self._bucket_bytes, self._shards.dtype)
        return self._plans[kind].digest

    def send(self, request: SendRequest) -> SendReport:
        """Sends the present weights to all engines of the request.

        Raises SyncError, which names rank and bucket; this rank has then left all links.
        """
        start = time.monotonic()
        sending = _Sending(request, Deadline(request.timeout))
        self._close([name for name in self._links if name not in request.links])
        try:
            for kind in sorted({engine.kind for engine in request.engines}):
                self._send_kind(kind, sending)
        except Exception as error:
            self.leave()
            raise SyncError(f"trainer rank {self._rank} failed to send {request.attempt}: {error}") from error
        sending.seconds["total"] = time.monotonic() - start
        return SendReport(tuple(sending.digests), tuple(sending.confirmed), sending.seconds, sending.bytes)

    def _send_kind(self, kind: str, sending: _Sending) -> None:
        request = sending.request
        plan, base = self._plans[kind], request.bases.get(kind, "")
        if base and base != self._base.get(kind):
            raise SyncError(f"deltas build on attempt {base!r}, which this rank has not kept")
        self._base.pop(kind, None)
        if plan.of_source(self._rank):
            with timed(sending.seconds, "join"):
                links = {
                    engine.url: self._join(engine, plan, sending) for engine in request.engines if engine.kind == kind
                }
            self._transmit(kind, plan, links, sending)
            if not request.stream:
                with timed(sending.seconds, "confirm"):
                    self._await_confirmations(plan, links, sending)
        if request.keep:
            self._base[kind] = request.attempt
        else:
            self._sent.pop(kind, None)

    def _join(self, engine: EngineLinks, plan: ShardPlan, sending: _Sending) -> Links:
        """The links to one engine, made now or for an earlier attempt."""
        if engine.name not in self._links:
            request = sending.request
            timeout = min(request.join[engine.kind], sending.deadline.left().total_seconds())
            index, size = plan.sources.index(self._rank), len(plan.sources) + plan.engine_ranks
            try:
                if self._store is None:
                    self._store = join_store(*request.meeting_point, timeout)
                self._links[engine.name] = Links(
                    self._store, engine.name, index, size, self._device.backend, self._host, timeout
                )
            except RuntimeError as error:
                raise SyncError(f"no links to {engine.url}: {error}") from error
        return self._links[engine.name]

    def _allocate(self, nbytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < nbytes:
            self._copies.clear()
            self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=self._device.torch_device) for _ in range(2)]

    def _transmit(self, kind: str, plan: ShardPlan, links: Mapping[str, Links], sending: _Sending) -> None:
        """Packs a bucket while others are on the wire; a buffer is reused only when its message has left."""
        request, buckets = sending.request, plan.of_source(self._rank)
        packed_bytes = (bucket.nbytes for _, bucket in buckets if not self._sent_in_place(bucket))
        self._allocate(max(packed_bytes, default=0))
        sent = self._sent.setdefault(kind, {}) if request.keep else {}
        base = request.bases.get(kind, "")
        against = self._sent.get(kind, {}) if base else {}
        headers = request.stream or bool(base)
        tables: dict[int, list[int]] = {}
        in_flight: deque[_Message] = deque()
        free = cycle(range(len(self._buffers)))
        for tag, bucket in buckets:
            buffer = None if self._sent_in_place(bucket) else next(free)
            while buffer is not None and any(message.buffer == buffer for message in in_flight):
                sending.wait(in_flight.popleft())
            with timed(sending.seconds, "pack"):
                packed = self._part(bucket) if buffer is None else self._pack(kind, buffer, tag, bucket)
            to = len(plan.sources) + bucket.target
            if headers:
                value = digest(packed)
                header, payload = self._encode(packed, bucket, against.get(tag), value)
                ahead = torch.tensor(header, dtype=torch.int64, device=packed.device)
                in_flight.append(_start(links, to, [(2 * tag, ahead), (2 * tag + 1, payload)], tag, buffer))
            else:
                payload = packed
                in_flight.append(_start(links, to, [(2 * tag + 1, payload)], tag, buffer))
                # The digest is taken while the bucket is on the wire.
                value = digest(packed)
                tables.setdefault(to, []).append(signed(value))
            if request.keep:
                sent[tag] = packed.to("cpu", copy=True)
            sending.digests.append(SentDigest(kind, bucket.target, tag, value))
            sending.bytes += payload.numel() * len(links)
        for to, values in tables.items():
            table = torch.tensor(values, dtype=torch.int64, device=self._device.torch_device)
            in_flight.append(_start(links, to, [(TABLE, table)], TABLE, None))
        for message in in_flight:
            sending.wait(message)

    def _await_confirmations(self, plan: ShardPlan, links: Mapping[str, Links], sending: _Sending) -> None:
        """Receives which engine ranks hold the complete version. The driver polls those that do not confirm."""
        awaited: list[tuple[str, int, torch.Tensor, Transfer]] = []
        for tp in plan.confirmed_to(self._rank):
            for url, link in links.items():
                words = torch.zeros(CONFIRMED_WORDS, dtype=torch.int64, device=self._device.torch_device)
                awaited.append((url, tp, words, link.receive(words, len(plan.sources) + tp, CONFIRMED)))
        for url, tp, words, work in awaited:
            try:
                work.wait(sending.left())
            except (RuntimeError, SyncError) as error:
                log.warning("Rank %d of %s did not confirm %s: %s", tp, url, sending.request.attempt, error)
                continue
            value, microseconds = words.tolist()
            sending.confirmed.append(Confirmation(url, tp, value & MASK, microseconds / 1e6))

    def _sent_in_place(self, bucket: ShardBucket) -> bool:
        """Whether the parameter's own memory is the message; its dtype may differ from that on the wire."""
        if not bucket.direct:
            return False
        param = self._params[bucket.regions[0].sources[0].param]
        return param.is_contiguous() and param.dtype == getattr(torch, bucket.dtype)

    def _part(self, bucket: ShardBucket) -> torch.Tensor:
        """The message of a direct bucket, [nbytes] uint8, where its parameter keeps it."""
        piece = bucket.regions[0].sources[0]
        return box_of(self._params[piece.param].detach(), piece.param_box).view(-1).view(torch.uint8)

    @torch.no_grad()
    def _pack(self, kind: str, buffer: int, tag: int, bucket: ShardBucket) -> torch.Tensor:
        """The message of one bucket, [nbytes] uint8, in one of the two buffers."""
        message = self._buffers[buffer][: bucket.nbytes]
        dtype: torch.dtype = getattr(torch, bucket.dtype)
        if (kind, tag) not in self._copies:
            self._copies[kind, tag] = packing(bucket, message, self._params)
        # The digest includes the padding.
        message[bucket.elements * dtype.itemsize :] = 0
        torch._foreach_copy_(*self._copies[kind, tag])  # pyright: ignore[reportPrivateImportUsage] - no public name
        return message

    def _encode(
        self, packed: torch.Tensor, bucket: ShardBucket, before: torch.Tensor | None, value: int
    ) -> tuple[BucketHeader, torch.Tensor]:
        """(header, payload): a delta against ``before`` when there is one and it is smaller, else the bucket."""
        header, payload = BucketHeader(FULL, packed.numel(), bucket.elements, signed(value)), packed
        if before is not None:
            dtype: torch.dtype = getattr(torch, bucket.dtype)
            new, old = (
                message.view(dtype)[: bucket.elements] for message in (packed, before.to(packed.device, copy=False))
            )
            if encoded := delta.encode(new, old):
                payload, changed = encoded
                header = BucketHeader(DELTA, payload.numel(), changed, signed(value))
        return header, payload

    def leave(self) -> None:
        """Leaves all links. May be called at any time, more than once."""
        self._store = None
        self._close(list(self._links))

    def _close(self, names: Sequence[str]) -> None:
        for link in [self._links.pop(name) for name in names]:
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
            source = box_of(params[piece.param], piece.param_box)
            inside = piece.hf_box._replace(row=piece.hf_box.row - box.row, col=piece.hf_box.col - box.col)
            targets.append(box_of(whole, inside).view_as(source))
            sources.append(source)
        start += region.elements
    return targets, sources


@dataclass
class _Sending:
    """One `send` in progress, and what it reports at the end."""

    request: SendRequest
    deadline: Deadline
    digests: list[SentDigest] = field(default_factory=list)
    confirmed: list[Confirmation] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("join", "pack", "wire", "confirm"), 0.0))
    bytes: int = 0

    def left(self) -> timedelta:
        """The limit of the next wait for a message."""
        return min(self.deadline.left(), timedelta(seconds=self.request.stall))

    def wait(self, message: _Message) -> None:
        """Waits until a message has left."""
        with timed(self.seconds, "wire"):
            for url, work in message.works:
                try:
                    work.wait(self.left())
                except (RuntimeError, SyncError) as error:
                    raise SyncError(f"bucket {message.tag} to {url}: {error}") from error


@dataclass(frozen=True)
class _Message:
    """A bucket on the wire to servers, by URL, packed into ``buffer`` if any. ``tensors`` live until it has left."""

    tag: int
    buffer: int | None
    works: list[tuple[str, Transfer]]
    tensors: tuple[torch.Tensor, ...]


def _start(
    links: Mapping[str, Links], to: int, parts: Sequence[tuple[int, torch.Tensor]], tag: int, buffer: int | None
) -> _Message:
    """Starts to send (tag, tensor) parts to one engine rank of every engine."""
    works = [(url, link.send(part, to, number)) for url, link in links.items() for number, part in parts]
    return _Message(tag, buffer, works, tuple(part for _, part in parts))
