"""The trainer rank's side of a shard-to-shard sync: pack what this rank owes each engine rank, and send it.

Engines that keep the same rectangles are of one kind: for each kind a parcel is packed and digested once and sent to every
engine of it, while the next one is packed. What lies in one line in a parameter is sent from there. Two parcels of memory,
and with deltas a host copy of what was sent last.

A failure closes this rank's links before it is raised; the next `send` makes new ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megasync.errors import SyncError
from megasync.layout.digest import MASK, digest, signed
from megasync.layout.engine_layout import EngineRank
from megasync.layout.layout import Box, Layout
from megasync.layout.shards import box_of
from megasync.sync.disk import delta
from megasync.sync.groups import Deadline, Links, Transfer, join_store, open_store
from megasync.sync.shard.inbound import CONFIRMED, CONFIRMED_WORDS, DELTA, FULL, TABLE, Header
from megasync.sync.shard.plan import Parcel, ShardPlan, plan_shards

if TYPE_CHECKING:
    from megasync.device import Device

log = logging.getLogger(__name__)


class ShardSender:
    """One trainer rank's part in every shard-to-shard sync.

    Args:
        rank: this trainer rank, global.
        params: live local parameters by name; read at each `send`.
        parcel_bytes: largest message.
        host: address of this rank; it listens there and nowhere else.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        params: Mapping[str, torch.Tensor],
        device: Device,
        host: str,
        parcel_bytes: int,
        dtype: str,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._params = params
        self._device = device
        self._host = host
        self._parcel_bytes = parcel_bytes
        self._dtype = dtype
        self._plans: dict[str, ShardPlan] = {}
        self._store: dist.Store | None = None
        self._links: dict[str, Links] = {}
        self._buffers: list[torch.Tensor] = []
        self._copies: dict[tuple[str, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        # Of each kind of engine: the attempt whose weights `_sent` holds, and those weights by tag.
        self._base: dict[str, str] = {}
        self._sent: dict[str, dict[int, torch.Tensor]] = {}

    def listen(self, timeout: float) -> tuple[str, int] | None:
        """Opens the meeting point of all links; (host, port) on rank 0, None on every other rank."""
        self.leave()
        if self._rank != 0:
            return None
        self._store = open_store(self._host, timeout)
        return self._host, self._store.port

    def prepare(self, kind: str, engine: Sequence[Mapping[str, Any]]) -> str:
        """Plans the way into one kind of engines (`EngineRank.to_json` of each of its ranks); the plan's digest."""
        if kind not in self._plans:
            ranks = [EngineRank.from_json(found) for found in engine]
            self._plans[kind] = plan_shards(self._layout, ranks, self._parcel_bytes, self._dtype)
        return self._plans[kind].digest

    def send(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Sends the present weights to all ``engines`` of the request.

        Args:
            given: ``attempt`` (its name), ``timeout`` and ``stall`` (seconds), ``meeting_point`` (host, port), ``join``
                (kind -> seconds for its links to be made), ``engines`` ([{name, kind, url}], the names being of links),
                ``links`` (names of all that may be used again), ``bases`` (kind -> attempt to send deltas against, or ""), ``keep`` (whether later attempts may send deltas against this one),
                ``stream`` (whether parcels are used as they come).

        Returns:
            The fields of an `Outcome`.

        Raises:
            SyncError: naming rank and parcel; this rank has then left all links.
        """
        start, deadline = time.monotonic(), Deadline(given["timeout"])
        outcome = Outcome()
        self._close([name for name in self._links if name not in given["links"]])
        try:
            for kind in sorted({engine["kind"] for engine in given["engines"]}):
                self._send_kind(kind, given, deadline, outcome)
        except Exception as error:
            self.leave()
            raise SyncError(f"trainer rank {self._rank} failed to send {given['attempt']}: {error}") from error
        outcome.seconds["total"] = time.monotonic() - start
        return asdict(outcome)

    def _send_kind(self, kind: str, given: Mapping[str, Any], deadline: Deadline, outcome: Outcome) -> None:
        plan, base = self._plans[kind], given["bases"].get(kind, "")
        if base and base != self._base.get(kind):
            raise SyncError(f"deltas build on attempt {base!r}, which this rank has not kept")
        self._base.pop(kind, None)
        mine = plan.of_source(self._rank)
        if mine:
            engines = [engine for engine in given["engines"] if engine["kind"] == kind]
            with outcome.clock("join"):
                links = {
                    engine["url"]: self._join(engine, plan, given["meeting_point"], given["join"][kind], deadline)
                    for engine in engines
                }
            packed = (parcel.nbytes for _, parcel in mine if not self._goes_as_it_is(parcel))
            self._allocate(max(packed, default=0))
            self._transmit(kind, mine, plan, links, given, deadline, outcome)
            if not given["stream"]:
                with outcome.clock("confirm"):
                    self._await_confirmations(plan, links, given, deadline, outcome)
        if given["keep"]:
            self._base[kind] = given["attempt"]
        else:
            self._sent.pop(kind, None)

    def _join(
        self,
        engine: Mapping[str, str],
        plan: ShardPlan,
        meeting_point: tuple[str, int],
        limit: float,
        deadline: Deadline,
    ) -> Links:
        """The links to one engine; those of the attempt before when the name is the same."""
        name = engine["name"]
        if name not in self._links:
            timeout = min(limit, deadline.left().total_seconds())
            index, size = plan.sources.index(self._rank), len(plan.sources) + plan.engine_ranks
            try:
                if self._store is None:
                    self._store = join_store(*meeting_point, timeout)
                self._links[name] = Links(self._store, name, index, size, self._device.backend, self._host, timeout)
            except RuntimeError as error:
                raise SyncError(f"no links to {engine['url']}: {error}") from error
        return self._links[name]

    def _allocate(self, nbytes: int) -> None:
        if not self._buffers or self._buffers[0].numel() < nbytes:
            self._copies.clear()
            self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=self._device.torch_device) for _ in range(2)]

    def _transmit(
        self,
        kind: str,
        mine: Sequence[tuple[int, Parcel]],
        plan: ShardPlan,
        links: Mapping[str, Links],
        given: Mapping[str, Any],
        deadline: Deadline,
        outcome: Outcome,
    ) -> None:
        """Packs a parcel while others are on the wire; a buffer is packed again only when its message has left."""
        sent = self._sent.setdefault(kind, {}) if given["keep"] else {}
        base = given["bases"].get(kind, "")
        against = self._sent.get(kind, {}) if base else {}
        headers = given["stream"] or bool(base)
        tables: dict[int, list[int]] = {}
        under_way: deque[_Message] = deque()
        buffers = cycle(range(len(self._buffers)))
        for tag, parcel in mine:
            buffer = None if self._goes_as_it_is(parcel) else next(buffers)
            while buffer is not None and any(message.buffer == buffer for message in under_way):
                self._settle(under_way.popleft(), deadline, given["stall"], outcome)
            with outcome.clock("pack"):
                packed = self._part(parcel) if buffer is None else self._pack(kind, buffer, tag, parcel)
            to = len(plan.sources) + parcel.target
            if headers:
                value = digest(packed)
                header, payload = self._encode(packed, parcel, against.get(tag), value)
                ahead = torch.tensor(header, dtype=torch.int64, device=packed.device)
                under_way.append(_start(links, to, [(2 * tag, ahead), (2 * tag + 1, payload)], tag, buffer))
            else:
                payload = packed
                under_way.append(_start(links, to, [(2 * tag + 1, payload)], tag, buffer))
                # While it is on its way.
                value = digest(packed)
                tables.setdefault(to, []).append(signed(value))
            if given["keep"]:
                sent[tag] = packed.to("cpu", copy=True)
            outcome.digests.append((kind, parcel.target, tag, value))
            outcome.bytes += payload.numel() * len(links)
        for to, values in tables.items():
            table = torch.tensor(values, dtype=torch.int64, device=self._device.torch_device)
            under_way.append(_start(links, to, [(TABLE, table)], TABLE, None))
        for message in under_way:
            self._settle(message, deadline, given["stall"], outcome)

    def _await_confirmations(
        self,
        plan: ShardPlan,
        links: Mapping[str, Links],
        given: Mapping[str, Any],
        deadline: Deadline,
        outcome: Outcome,
    ) -> None:
        """Hears which engine ranks hold the whole version. Those that do not say so are left for the driver to ask."""
        awaited = []
        for tp in plan.confirmed_to(self._rank):
            for url, link in links.items():
                words = torch.zeros(CONFIRMED_WORDS, dtype=torch.int64, device=self._device.torch_device)
                work = link.receive(words, len(plan.sources) + tp, CONFIRMED)
                awaited.append((url, tp, words, work))
        for url, tp, words, work in awaited:
            try:
                work.wait(min(deadline.left(), timedelta(seconds=given["stall"])))
            except (RuntimeError, SyncError) as error:
                log.warning("rank %d of %s did not confirm %s: %s", tp, url, given["attempt"], error)
                continue
            value, microseconds = words.tolist()
            outcome.confirmed.append((url, tp, value & MASK, microseconds / 1e6))

    def _settle(self, message: _Message, deadline: Deadline, stall: float, outcome: Outcome) -> None:
        with outcome.clock("wire"):
            for url, work in message.works:
                try:
                    work.wait(min(deadline.left(), timedelta(seconds=stall)))
                except (RuntimeError, SyncError) as error:
                    raise SyncError(f"parcel {message.tag} to {url}: {error}") from error

    def _goes_as_it_is(self, parcel: Parcel) -> bool:
        """Whether the parameter's own memory is the message; a parameter may be kept in another dtype than is sent."""
        if not parcel.direct:
            return False
        param = self._params[parcel.regions[0].sources[0].param]
        return param.is_contiguous() and param.dtype == getattr(torch, parcel.dtype)

    def _part(self, parcel: Parcel) -> torch.Tensor:
        """The message of a direct parcel, [nbytes] uint8, where its parameter keeps it."""
        piece = parcel.regions[0].sources[0]
        return box_of(self._params[piece.param].detach(), piece.param_box).view(-1).view(torch.uint8)

    @torch.no_grad()
    def _pack(self, kind: str, buffer: int, tag: int, parcel: Parcel) -> torch.Tensor:
        """The message of one parcel, [nbytes] uint8, in one of the two buffers."""
        message = self._buffers[buffer][: parcel.nbytes]
        dtype: torch.dtype = getattr(torch, parcel.dtype)
        if (kind, tag) not in self._copies:
            self._copies[kind, tag] = packing(parcel, message, self._params)
        # Padding up to a whole word is digested too.
        message[parcel.elements * dtype.itemsize :] = 0
        torch._foreach_copy_(*self._copies[kind, tag])
        return message

    def _encode(
        self, packed: torch.Tensor, parcel: Parcel, before: torch.Tensor | None, value: int
    ) -> tuple[Header, torch.Tensor]:
        """(header, payload): a delta against ``before`` when there is one and it is smaller, else the parcel."""
        header, payload = Header(FULL, packed.numel(), parcel.elements, signed(value)), packed
        if before is not None:
            dtype: torch.dtype = getattr(torch, parcel.dtype)
            new, old = (
                message.view(dtype)[: parcel.elements] for message in (packed, before.to(packed.device, copy=False))
            )
            if encoded := delta.encode(new, old):
                payload, changed = encoded
                header = Header(DELTA, payload.numel(), changed, signed(value))
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
                log.warning("trainer rank %d could not close its links: %s", self._rank, error)


def packing(
    parcel: Parcel, message: torch.Tensor, params: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The copies that pack a parcel: rectangles of its message [nbytes] uint8, and the same ones of parameters."""
    targets, sources = [], []
    values, start = message.view(getattr(torch, parcel.dtype)), 0
    for region in parcel.regions:
        box = region.slot.hf_box
        whole = values[start : start + region.elements].view(box.rows, box.cols)
        for piece in region.sources:
            source = box_of(params[piece.param], piece.param_box)
            targets.append(box_of(whole, _inside(piece.hf_box, box)).view_as(source))
            sources.append(source)
        start += region.elements
    return targets, sources


@dataclass
class Outcome:
    """What `ShardSender.send` tells the driver."""

    # (kind of engine, engine rank, tag, digest) of each parcel.
    digests: list[tuple[str, int, int, int]] = field(default_factory=list)
    # (URL of an engine, engine rank, digest of all that it received, seconds that it spent on digests).
    confirmed: list[tuple[str, int, int, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"join": 0.0, "pack": 0.0, "wire": 0.0, "confirm": 0.0})
    bytes: int = 0

    @contextmanager
    def clock(self, activity: str) -> Iterator[None]:
        """Adds the time spent inside to one activity."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[activity] += time.monotonic() - start


@dataclass(frozen=True)
class _Message:
    """A parcel on the wire to servers, by URL, packed into ``buffer`` if any; ``tensors`` must live until it has left."""

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


def _inside(box: Box, outer: Box) -> Box:
    """The box as seen from the first element of the outer one."""
    return box._replace(row=box.row - outer.row, col=box.col - outer.col)
