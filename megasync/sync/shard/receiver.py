"""The serving rank's side of a shard-to-shard sync: stage a version while generating, then make it live at once.

A `ShardReceiver` lives in every tensor-parallel rank of an engine, inside the engine's own process, and sees the engine
only as a dictionary of parameters. Staging runs in a thread: buckets land in an `Arena` beside the live weights, and
each is checked against the digest that its sender took. Nothing of a staged version is visible until `commit`.

Without room for an arena, `commit` itself receives, bucket by bucket. The engine is paused meanwhile, and a failure
leaves it with parts of two versions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple

import torch

from megasync.base.store import join_store
from megasync.device import side_stream, synchronize
from megasync.errors import SyncError, raised_as
from megasync.layout.digest import MASK, combine, digest, signed
from megasync.serving.plugin_protocol import HOST_VARIABLE
from megasync.sync.attempt import timed
from megasync.sync.groups import Deadline, PeerGroup, Transfer
from megasync.sync.messages import (
    CONFIRMED,
    DELTA,
    FULL,
    TABLE,
    BucketHeader,
    CommitRequest,
    Empty,
    InboundBucket,
    ReceivePlan,
    ReceivePlanAnswer,
    ReceivePlanRequest,
    ReceiveRequest,
    StageReport,
    SyncMessage,
)
from megasync.sync.shard import delta
from megasync.sync.shard.arena import Arena, Params, dtype_of, rectangles
from megasync.sync.shared_memory import make_links

log = logging.getLogger(__name__)

# Shape, strides and dtype.
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass
class Staging:
    """One version on its way into the arena."""

    attempt: str
    state: Literal["running", "staged", "failed", "committed"] = "running"
    error: str = ""
    digests: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    received: int = 0

    def report(self) -> StageReport:
        return StageReport(
            self.attempt, self.state, self.error, combine(self.digests), dict(self.seconds), self.received
        )


@dataclass(frozen=True)
class Incoming:
    """One transfer in progress: what to receive, over which links, until when."""

    plan: ReceivePlan
    request: ReceiveRequest
    staging: Staging
    links: PeerGroup
    deadline: Deadline
    # Trainer ranks that have sent something.
    heard: set[int] = field(default_factory=set)

    def wait(self, work: Transfer, bucket: InboundBucket) -> None:
        """Waits for one message of a bucket, at most ``stall`` seconds. Raises SyncError.

        A rank's first one may take ``patience`` seconds longer, in which it makes links to other engines.
        """
        stall = self.request.stall + (0.0 if bucket.source in self.heard else self.request.patience)
        what = f"bucket {bucket.tag} from trainer rank {bucket.source}"
        with raised_as(SyncError, what, of=(RuntimeError, SyncError)):
            work.wait(min(self.deadline.left(), timedelta(seconds=stall)))
        self.heard.add(bucket.source)


class _Posted(NamedTuple):
    """A message that is being received in ``place``, which is in the ring if it is ``scattered``, and its header."""

    number: int
    bucket: InboundBucket
    place: torch.Tensor
    scattered: bool
    header: Transfer | None
    payload: Transfer | None


class _Ring:
    """Memory of two of the largest messages, for messages that leave it in the order in which they came.

    Many small ones fit, so that a receiver which waits for its turn on a busy core holds up no sender.
    """

    def __init__(self, largest: int, device: torch.device) -> None:
        self._memory = torch.empty(2 * largest, dtype=torch.uint8, device=device)
        # (first byte, end) of each message.
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A place of this size, or None while there is none."""
        if not self._taken:
            start = 0
        else:
            (oldest, _), (newest, start) = self._taken[0], self._taken[-1]
            limit = oldest if newest < oldest else self._memory.numel()
            if start + nbytes > limit:
                if newest < oldest or nbytes > oldest:
                    return None
                start = 0
        self._taken.append((start, start + nbytes))
        return self._memory[start : start + nbytes]

    def free(self) -> None:
        """Gives back the place that was taken first."""
        self._taken.popleft()


class ShardReceiver:
    """Answers the driver's commands on one serving rank. The constructor allocates and opens nothing.

    Args:
        tp: this rank's tensor-parallel index.
        params: called for the live parameters and buffers, by the names of the trace; an engine may replace them.
        exchange: whether the engine does not remember where its parameters are, so their memory may be exchanged.
    """

    def __init__(self, tp: int, params: Callable[[], Params], exchange: bool = False) -> None:
        self._tp = tp
        self._params = params
        self._exchange = exchange
        # Messages arrive where the weights are.
        self._wire = next(iter(params().values())).device
        self._plan: ReceivePlan | None = None
        self._arena: Arena | None = None
        # The attributes of the request that it was made for.
        self._arena_key: tuple[ReceivePlan, str, bool] | None = None
        self._links: PeerGroup | None = None
        self._link_name = ""
        self._staging: Staging | None = None
        # The attempt whose weights the arena holds completely, if deltas may build on it.
        self._base = ""
        # The parameters of the plan as they were when they were traced.
        self._forms: dict[str, Form] = {}

    def handle(self, command: str, given: object) -> SyncMessage:
        """Runs one command on its request in parsed JSON; returns at once.

        Raises SyncError for an unknown command, a malformed request, or one that does not fit the present state.
        """
        match command:
            case "receive_plan":
                return self._take_plan(ReceivePlanRequest.parse(given))
            case "stage":
                return self._stage(ReceiveRequest.parse(given))
            case "poll":
                Empty.parse(given)
                return self._staging.report() if self._staging else StageReport()
            case "drop":
                Empty.parse(given)
                return self._drop()
            case _:
                raise SyncError(f"unknown command {command!r}; known are receive_plan, stage, poll, drop")

    def _take_plan(self, request: ReceivePlanRequest) -> ReceivePlanAnswer:
        """Keeps this rank's plan for later versions, and decides by ``arena_bytes`` whether it stages."""
        self._check_idle()
        plan = request.plans[self._tp]
        stages = request.arena_bytes is None or plan.nbytes <= request.arena_bytes
        key = (plan, request.arena, request.deltas)
        if self._arena is not None and (self._arena_key != key or not stages):
            self._arena.close()
            self._arena, self._base = None, ""
        self._plan, self._arena_key = plan, key
        self._forms = self._present_forms(plan)
        if stages and self._arena is None:
            where = torch.device("cpu") if request.arena == "host" else self._wire
            self._arena = Arena(plan, self._params(), where, self._exchange and not request.deltas)
            synchronize(self._wire)
        return ReceivePlanAnswer(stages, plan.nbytes)

    def _check_idle(self) -> None:
        if self._staging is not None and self._staging.state == "running":
            raise SyncError(f"attempt {self._staging.attempt} is still being received")

    def _stage(self, request: ReceiveRequest) -> StageReport:
        """Starts to receive the attempt; with ``base`` set, senders may send deltas against that attempt."""
        self._check_idle()
        if self._plan is None:
            return StageReport()
        plan = self._plan_named(request.plan)
        if self._arena is None:
            raise SyncError("this rank has no arena to stage in")
        if request.base and request.base != self._base:
            raise SyncError(f"deltas build on attempt {request.base!r}, but the arena holds {self._base!r}")
        arena, staging = self._arena, Staging(request.attempt)
        self._staging, self._base = staging, ""

        def run() -> None:
            start = time.monotonic()
            try:
                with side_stream(self._wire):
                    incoming = self._connect(plan, request, staging)
                    self._fill_arena(incoming, arena)
                    staging.seconds["total"] = time.monotonic() - start
                    self._base = staging.attempt if arena.keeps_versions else ""
                    # Before the confirmation, because the commit may follow it immediately.
                    staging.state = "staged"
                    self._confirm(incoming)
            except Exception as error:  # noqa: BLE001 - every failure must reach the driver
                self._leave()
                staging.error = f"{type(error).__name__}: {error}"
                staging.state = "failed"

        threading.Thread(target=run, name="megasync-stage", daemon=True).start()
        return staging.report()

    def _drop(self) -> Empty:
        """Forgets what is staged and leaves the links. Staging that runs cannot be dropped: it ends by its deadline."""
        self._check_idle()
        self._leave()
        self._staging = None
        return Empty()

    def _plan_named(self, name: str) -> ReceivePlan:
        if self._plan is None or self._plan.name != name:
            raise SyncError("this rank has no receive plan, or a different one than the senders")
        return self._plan

    # Receiving

    def _connect(self, plan: ReceivePlan, request: ReceiveRequest, staging: Staging) -> Incoming:
        """Joins the links to the senders, or reuses those of the previous attempt when the name is the same."""
        meet, deadline = request.rendezvous, Deadline(request.timeout)
        with timed(staging.seconds, "join"):
            if self._links is None or self._link_name != meet.name:
                self._leave()
                timeout = min(meet.seconds, deadline.left().total_seconds())
                store = join_store(meet.host, meet.port, timeout)
                first = len(meet.sources)
                rank, size = first + self._tp, first + meet.engine_ranks
                # The URL is that of the engine's first node.
                host = os.environ.get(HOST_VARIABLE, meet.own_host)
                self._links = make_links(store, meet.name, rank, size, meet.backend, host, timeout, self._wire)
                self._link_name = meet.name
        return Incoming(plan, request, staging, self._links, deadline)

    def _leave(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            try:
                links.close()
            except RuntimeError as error:
                log.warning("Links %s could not be closed: %s", self._link_name, error)

    def _fill_arena(self, incoming: Incoming, arena: Arena) -> None:
        """Brings the whole arena to what the senders have now, bucket by bucket."""
        request, digests = incoming.request, incoming.staging.digests
        arena.begin()

        def landing(bucket: InboundBucket) -> torch.Tensor | None:
            # A delta may come in the bucket's place.
            return None if request.base else arena.landing(bucket)

        for bucket, message, header in self._arrivals(incoming, landing):
            if header.form == DELTA:
                kept = arena.kept(bucket)
                values = kept.view(dtype_of(bucket))[: bucket.elements]
                delta.apply(message.to(values.device), header.changed, values)
                received = _digest(kept, incoming.staging)
            else:
                # Where the message is: on a GPU before the copy to the host, which then overlaps the next message.
                received = _digest(message, incoming.staging)
                if landing(bucket) is None:
                    arena.put(bucket, message)
            if request.headers:
                _compare(bucket, received, digests[bucket.tag])
            else:
                digests[bucket.tag] = received
        if not request.headers:
            self._compare_with_tables(incoming)
        synchronize(self._wire)

    def _compare_with_tables(self, incoming: Incoming) -> None:
        """Receives each sender's table of digests, in the order of its buckets, and compares it with what arrived."""
        buckets_of: dict[int, list[InboundBucket]] = defaultdict(list)
        for bucket in incoming.plan.buckets:
            buckets_of[bucket.source].append(bucket)
        for source, buckets in buckets_of.items():
            table = torch.zeros(len(buckets), dtype=torch.int64, device=self._wire)
            index = incoming.request.rendezvous.sources.index(source)
            incoming.wait(incoming.links.receive(table, index, TABLE), buckets[-1])
            for bucket, expected in zip(buckets, table.tolist(), strict=True):
                _compare(bucket, incoming.staging.digests[bucket.tag], expected & MASK)

    def _confirm(self, incoming: Incoming) -> None:
        """Tells a sender that everything arrived. The driver also polls, so a failure is only logged."""
        staging = incoming.staging
        microseconds = int(1e6 * staging.seconds.get("digest", 0.0))
        words = torch.tensor([signed(combine(staging.digests)), microseconds], device=self._wire)
        to = incoming.request.rendezvous.sources.index(incoming.plan.confirmed_to)
        try:
            incoming.links.send(words, to, CONFIRMED).wait(timedelta(seconds=incoming.request.stall))
        except RuntimeError as error:
            log.warning("Attempt %s is staged, but could not be confirmed to a sender: %s", staging.attempt, error)

    def _arrivals(
        self, incoming: Incoming, landing: Callable[[InboundBucket], torch.Tensor | None]
    ) -> Iterator[tuple[InboundBucket, torch.Tensor, BucketHeader]]:
        """(bucket, its message, its header) in order; the next messages are being received meanwhile.

        A message without a ``landing`` arrives in a `_Ring`, and is there until the next one is asked for.
        """
        plan, request, links = incoming.plan, incoming.request, incoming.links
        members = {rank: index for index, rank in enumerate(request.rendezvous.sources)}
        headers = torch.zeros(len(plan.buckets), len(BucketHeader._fields), dtype=torch.int64, device=self._wire)
        largest = max((bucket.nbytes for bucket in plan.buckets if landing(bucket) is None), default=0)
        ring = _Ring(largest, self._wire)
        coming, posted = deque(enumerate(plan.buckets)), deque[_Posted]()
        # The payload behind a header of unknown size cannot be posted yet.
        ahead = 1 if request.base else links.window

        def receive(bucket: InboundBucket, place: torch.Tensor, nbytes: int) -> Transfer:
            return links.receive(place[:nbytes], members[bucket.source], 2 * bucket.tag + 1)

        def post() -> None:
            while coming and len(posted) < ahead:
                index, bucket = coming[0]
                place = landing(bucket)
                if scattered := place is None:
                    place = ring.take(bucket.nbytes)
                if place is None:
                    return
                coming.popleft()
                header = None
                if request.headers:
                    header = links.receive(headers[index], members[bucket.source], 2 * bucket.tag)
                payload = None if request.base else receive(bucket, place, bucket.nbytes)
                posted.append(_Posted(index, bucket, place, scattered, header, payload))

        post()
        while posted:
            index, bucket, place, scattered, work, payload = posted.popleft()
            header = BucketHeader(FULL, bucket.nbytes, bucket.elements, 0)
            if work is not None:
                incoming.wait(work, bucket)
                header = BucketHeader(*headers[index].tolist())
                incoming.staging.digests[bucket.tag] = header.digest & MASK
            incoming.staging.received += header.nbytes
            incoming.wait(payload or receive(bucket, place, header.nbytes), bucket)
            yield bucket, place[: header.nbytes], header
            if scattered:
                ring.free()
            post()

    # Committing

    def check(self, given: object) -> CommitRequest:
        """The commit that was requested in parsed JSON; writes nothing.

        Raises SyncError when the attempt is not staged here completely (unless it is to be streamed), or a parameter
        has changed since it was traced.
        """
        request = CommitRequest.parse(given)
        present = self._present_forms(self._plan_named(request.plan))
        for name, form in self._forms.items():
            if present[name] != form:
                raise SyncError(
                    f"the engine keeps {name} as {present[name]} during an update (shape, strides, dtype), but kept it "
                    f"as {form} when its layout was traced: a kernel packed it; set sync.transport to broadcast or disk"
                )
        staging = self._staging
        staged = staging is not None and staging.attempt == request.attempt and staging.state == "staged"
        if request.stream is None and not staged:
            present = f"{staging.attempt!r} is {staging.state}" if staging else "nothing is"
            raise SyncError(f"attempt {request.attempt!r} is not staged here; {present}")
        return request

    @torch.no_grad()
    def commit(self, request: CommitRequest) -> None:
        """Makes the staged attempt the live weights; `check` must have passed on every rank."""
        plan, params = self._plan_named(request.plan), self._params()
        if request.stream is not None:
            for fill in plan.fills:
                fill.rectangle.of(params[fill.param]).fill_(fill.value)
            self._load_while_receiving(plan, request.stream, params)
        else:
            assert self._arena is not None
            assert self._staging is not None
            # A second commit would bring back what was live before.
            self._staging.state = "committed"
            self._arena.commit(params)
        # The arena may be overwritten as soon as this is answered.
        synchronize(self._wire)

    def _present_forms(self, plan: ReceivePlan) -> dict[str, Form]:
        params = self._params()
        return {name: (tuple(params[name].shape), params[name].stride(), params[name].dtype) for name in plan.params}

    def _load_while_receiving(self, plan: ReceivePlan, request: ReceiveRequest, params: Params) -> None:
        """Loads each bucket into the live parameters as soon as it has arrived and its digest is right."""
        staging = Staging(request.attempt)
        try:
            incoming = self._connect(plan, request, staging)
            for bucket, message, _ in self._arrivals(incoming, lambda _: None):
                _compare(bucket, _digest(message, staging), staging.digests[bucket.tag])
                for target, source in rectangles(bucket, message, params):
                    target.copy_(source)
        except Exception:
            self._leave()
            raise


def _digest(message: torch.Tensor, staging: Staging) -> int:
    with timed(staging.seconds, "digest"):
        return digest(message)


def _compare(bucket: InboundBucket, found: int, expected: int) -> None:
    if found != expected:
        raise SyncError(
            f"bucket {bucket.tag} from trainer rank {bucket.source} ({bucket.rectangles[0].param} ..) arrived with "
            f"digest {found:016x}, but was sent with {expected:016x}"
        )
