"""Shard-to-shard publishing: the driver's side, over servers that carry megasync's plugin.

    connect → stage ─────────────→ commit, each server alone → verify
    (trace, plan;  while servers     pause → begin → copy → end → continue
     new servers)  generate

A server generates only while it holds exactly one version. Until its commit it serves the previous one, whatever
fails; a commit copies what has been verified already. A server that fails inside its commit stays paused, alone, until
a later publish has brought it a complete version (`quarantined`). ``sync.wave`` limits how many servers are updated at
a time; nothing ever pauses all of them together.

Replicas of the trainer are assigned to engines (`shard.feeds`), and each engine has links to those alone. Links live
until they fail: a failure of one engine or of its links costs no other engine its links.

Every phase has a deadline of ``timeouts.weight_sync`` seconds, every message one of ``timeouts.sync_stall``, and making
links one of `JOIN_SECONDS`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from megasync.errors import SyncError
from megasync.layout.digest import MASK
from megasync.layout.engine_layout import EngineRank
from megasync.layout.layout import Layout
from megasync.sync.attempt import Attempt, PhaseFailed
from megasync.sync.messages import (
    CommitRequest,
    EngineLinks,
    ReceivePlanRequest,
    ReceiveRequest,
    Rendezvous,
    SendReport,
    SendRequest,
)
from megasync.sync.server_update import call_each
from megasync.sync.shard.engine import ServingEngine
from megasync.sync.shard.feeds import WHOLE, Feed, assign_feeds
from megasync.sync.shard.plan import MOST_SOURCES, ShardPlan, plan_shards, receive_plan
from megasync.sync.weight_sync import GRACE_SECONDS, SendingRank, TrainerRanks, WeightSync

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# Seconds to make all missing links. A failure at one end does not end the other's wait.
JOIN_SECONDS = 60.0

Sending = asyncio.Future[list[SendReport]]


class ShardSync(WeightSync[ServingEngine]):
    """Publishes versions from shard to shard: nothing is gathered anywhere.

    A method ``shard_x`` of the ranks is `ShardSender.x` on each of them. ``dtype`` is that of the trainer's parameters,
    ``backend`` that of the links, "gloo" or "nccl".
    """

    _update_type = ServingEngine

    def __init__(
        self,
        servers: Sequence[ServerControl],
        ranks: TrainerRanks,
        layout: Layout,
        dtype: str,
        backend: str,
        config: SyncConfig,
        timeouts: TimeoutConfig,
        stages: bool = True,
    ) -> None:
        """Without ``stages`` servers are paused during the whole transfer, and need no memory for it."""
        super().__init__(servers, ranks, config, timeouts)
        self._layout = layout
        self._dtype = dtype
        self._backend = backend
        self._config = config
        self._stall = timeouts.sync_stall
        self._join = max(self._stall, min(self._seconds, JOIN_SECONDS))
        self._bucket_bytes = config.bucket_mb * 2**20
        self._arena_bytes = None if config.arena_mb is None else config.arena_mb * 2**20
        if not stages:
            self._arena_bytes = 0
        self._plans: dict[str, ShardPlan] = {}
        # By plan, the attempt against which the ranks can send deltas.
        self._bases: dict[str, str] = {}
        self._meeting_point: tuple[str, int] | None = None
        self._run = secrets.token_hex(4)
        self._attempts = 0
        self._links_made = 0

    def forget_ranks(self, data_parallel: int) -> None:
        """The trainer ranks are new processes: they learn about every engine again, and new links are made."""
        if data_parallel != self._layout.topology.data:
            self._layout = self._layout.on(replace(self._layout.topology, data=data_parallel))
            for engine in self._servers.values():
                engine.feed = None
        self._meeting_point = None
        self._plans.clear()
        self._bases.clear()
        for engine in self._servers.values():
            engine.forget()

    async def connect(self) -> None:
        """Traces and plans for every new server. Also raises PublishError when layouts do not match."""
        async with self._lock:
            attempt = self._new_attempt(0)
            try:
                await self._connect(list(self._servers.values()), attempt)
            except Exception as error:
                raise attempt.error(error, self._quarantined) from error

    async def close(self) -> None:
        async with self._lock:
            attempt = self._new_attempt(0)
            await self._leave_all()
            await asyncio.gather(*(self._release(engine, attempt) for engine in self._involved(attempt)))

    def _new_attempt(self, version: int) -> Attempt:
        self._attempts += 1
        return super()._new_attempt(version)

    async def _move(self, servers: list[ServingEngine], attempt: Attempt, *, everywhere: bool) -> int:
        """After a failure, servers that had committed serve the version, all others the previous one; the next publish
        brings them together.
        """
        await self._connect(servers, attempt)
        name = f"{attempt.version}-{self._run}-{self._attempts}"
        size = self._config.wave or max(1, len(servers))
        moved = 0
        for first in range(0, len(servers), size):
            moved += await self._update(servers[first : first + size], f"{name}.{first}", attempt)
        return moved

    # Connect

    async def _connect(self, servers: list[ServingEngine], attempt: Attempt) -> None:
        """Prepares every engine that is new, or was restarted, for staging."""
        new: list[ServingEngine] = []
        traced: dict[str, list[EngineRank]] = {}

        async def trace(engine: ServingEngine) -> None:
            if await engine.is_new():
                frozen = self._layout.frozen_tensors
                specs = [*self._layout.hf_tensors.items(), *frozen.items()]
                ranks = await engine.trace(specs, self._join + GRACE_SECONDS)
                traced[engine.kind] = [rank.without(frozen) for rank in ranks]
                new.append(engine)

        with attempt.during("connect"):
            await call_each(servers, trace)
            # In the order of the servers, which does not depend on who answered first.
            by_plan: dict[str, list[ServingEngine]] = {}
            for engine in (engine for engine in servers if engine in new):
                by_plan.setdefault(await self._assign(engine, new, traced[engine.kind]), []).append(engine)
            for plan, engines in by_plan.items():
                await self._plan_for(plan, engines, traced[engines[0].kind])

    async def _assign(self, engine: ServingEngine, new: Sequence[ServingEngine], ranks: Sequence[EngineRank]) -> str:
        """Decides which replicas feed a new engine; the name of its plan."""
        if engine.feed is None:
            alike = [other for other in new if other.kind == engine.kind and other.feed is None]
            single = await self._make_plan(engine.kind, alike, ranks, (WHOLE,))
            sources = max(len(single.sources_of(tp)) for tp in range(single.engine_ranks))
            present = [other.feed for other in self._servers.values() if other.feed]
            replicas, most = self._layout.topology.replicas, max(1, MOST_SOURCES // sources)
            feeds = assign_feeds(present, len(alike), replicas, min(most, replicas))
            for other, feed in zip(sorted(alike, key=list(self._servers.values()).index), feeds, strict=True):
                other.feed = feed
        assert engine.feed is not None
        shares = engine.feed.shares
        return engine.kind if len(shares) == 1 else f"{engine.kind}-{'-'.join(map(str, shares))}"

    async def _make_plan(
        self, name: str, engines: Sequence[ServingEngine], ranks: Sequence[EngineRank], shares: Sequence[int]
    ) -> ShardPlan:
        if name not in self._plans:
            layout = self._layout.with_replicas(len(shares))
            try:
                self._plans[name] = await asyncio.to_thread(
                    plan_shards, layout, ranks, self._bucket_bytes, self._dtype, shares
                )
            except SyncError as error:
                raise PhaseFailed({engine.url: error for engine in engines}) from error
        return self._plans[name]

    async def _plan_for(self, name: str, engines: Sequence[ServingEngine], ranks: Sequence[EngineRank]) -> None:
        """Has the trainer ranks that feed these engines, which share a plan, and the engines themselves prepare it."""
        feeds = [engine.feed for engine in engines if engine.feed]
        plan = await self._make_plan(name, engines, ranks, feeds[0].shares)
        topology, feeding = self._layout.topology, sorted({replica for feed in feeds for replica in feed.replicas})
        derived = await self._ranks.on_all(
            self._seconds, SendingRank.shard_prepare, name, ranks, feeds[0].shares, feeding
        )
        other = [rank for rank, digest in enumerate(derived) if digest and digest != plan.digest]
        if other:
            raise SyncError(f"trainer ranks {other} derived another plan than the driver; their configurations differ")

        async def inform(engine: ServingEngine) -> None:
            feed = cast(Feed, engine.feed)
            plans = tuple(
                receive_plan(plan, tp, name, rank.fills, feed.turn, partial(topology.rank_of, feed.replicas))
                for tp, rank in enumerate(ranks)
            )
            config = self._config
            request = ReceivePlanRequest(plans, config.arena, self._arena_bytes, config.delta)
            await engine.take_receive_plan(name, request)

        await call_each(engines, inform)

    # Stage and commit

    async def _update(self, wave: Sequence[ServingEngine], name: str, attempt: Attempt) -> int:
        """Brings one wave of engines to the new version; bytes that went over the wire."""
        staging = [engine for engine in wave if engine.stages]
        streaming = [engine for engine in wave if not engine.stages]
        moved = 0
        if staging:
            with attempt.during("stage"):
                moved += await self._stage(staging, name, attempt)
            with attempt.during("commit"):
                await call_each(staging, lambda engine: self._commit(engine, name, attempt))
        if streaming:
            with attempt.during("stream"):
                moved += await self._stream(streaming, name + "s", attempt)
        with attempt.during("verify"):
            await call_each(wave, lambda engine: engine.verify(attempt))
        return moved

    async def _stage(self, engines: Sequence[ServingEngine], name: str, attempt: Attempt) -> int:
        """All engines receive the version beside the one that they serve, and the digests of both ends agree."""
        sending, requests = await self._start_sending(engines, name, self._common_bases(engines), attempt, stream=False)

        async def receive(engine: ServingEngine) -> list[int]:
            if not await engine.stage(requests[engine.url]):
                return []
            return await engine.staged(name, self._plans[engine.plan].engine_ranks, sending)

        receiving = {engine.url: asyncio.ensure_future(receive(engine)) for engine in engines}
        attempt.tasks |= receiving
        await attempt.wait_for_tasks(self._seconds + 2 * GRACE_SECONDS, every=True)
        reports, known = sending.result(), [engine for engine in engines if engine.plan]
        self._note_sent(reports, attempt)
        failed = dict(item for report in reports for item in report.failed.items())
        causes: dict[str, BaseException] = {}
        for engine in known:
            received, expected = receiving[engine.url].result(), self._sent_to(engine, reports)
            if engine.url in failed:
                causes[engine.url] = SyncError(failed[engine.url])
            elif received != expected:
                causes[engine.url] = SyncError(f"it received digests {received}, but {expected} were sent")
        if causes:
            raise PhaseFailed(causes)
        self._drop_broken_links(known, attempt)
        if self._config.delta:
            self._bases |= {engine.plan: name for engine in known}
            for engine in known:
                engine.base = name
        moved = sum(report.bytes for report in reports)
        if len(known) < len(engines):
            # The processes of the others were restarted since the last publish.
            new = [engine for engine in engines if not engine.plan]
            await self._connect(new, attempt)
            moved += await self._stage(new, name + "n", attempt)
        return moved

    def _sent_to(self, engine: ServingEngine, reports: Sequence[SendReport]) -> list[int]:
        """By engine rank, the digest of all that was sent to it."""
        plan, feed = self._plans[engine.plan], cast(Feed, engine.feed)
        digests = [0] * plan.engine_ranks
        for source in plan.sources:
            for sent in reports[self._layout.topology.rank_of(feed.replicas, source)].digests:
                if (sent.plan, sent.source) == (engine.plan, source):
                    digests[sent.engine_rank] = (digests[sent.engine_rank] + sent.digest) & MASK
        return digests

    def _drop_broken_links(self, engines: Iterable[ServingEngine], attempt: Attempt) -> list[str]:
        """Forgets the links over which not everything went as it should; their names. A publish makes new ones."""
        reports = attempt.tasks["trainer"].result()
        failed = {url for report in reports for url in report.failed}
        confirmed = Counter(rank.url for report in reports for rank in report.confirmed)
        broken: list[str] = []
        for engine in engines:
            task = attempt.tasks[engine.url]
            fine = task.done() and not task.cancelled() and task.exception() is None and engine.url not in failed
            if not fine or (engine.stages and confirmed[engine.url] < self._plans[engine.plan].engine_ranks):
                broken.append(engine.links)
                engine.links = ""
        return broken

    def _common_bases(self, engines: Sequence[ServingEngine]) -> dict[str, str]:
        """Plan -> the attempt against which deltas are sent: one that the ranks and all its engines hold, or none."""
        due = self._config.delta_full_every
        if not self._config.delta or (due and self._attempts % due == 0):
            return {}
        held: dict[str, set[str]] = {}
        for engine in engines:
            held.setdefault(engine.plan, set()).add(engine.base)
        return {plan: self._bases[plan] for plan, bases in held.items() if bases == {self._bases.get(plan)}}

    async def _start_sending(
        self, engines: Sequence[ServingEngine], name: str, bases: dict[str, str], attempt: Attempt, *, stream: bool
    ) -> tuple[Sending, dict[str, ReceiveRequest]]:
        """Has the ranks send; the trainer's task of the attempt ends with `ShardSender.send` on each rank.

        Returns that task, and by URL what the ranks of each engine need to receive it.
        """
        if (meeting_point := self._meeting_point) is None:
            points = await self._ranks.on_all(self._limit, SendingRank.shard_listen, self._seconds)
            self._meeting_point = meeting_point = next(point for point in points if point is not None)
        patience = 0.0
        for engine in engines:
            if not engine.links:
                self._links_made += 1
                engine.links = f"megasync-{self._run}-{self._links_made}"
                patience = self._join
            # Until it has received everything, its arena holds parts of two versions.
            engine.base = ""
        request = SendRequest(
            attempt=name,
            timeout=self._seconds,
            stall=self._stall,
            meeting_point=meeting_point,
            engines=tuple(
                EngineLinks(engine.links, engine.plan, engine.url, cast(Feed, engine.feed).replicas)
                for engine in engines
            ),
            links=tuple(engine.links for engine in self._servers.values()),
            join=self._join,
            bases=bases,
            stream=stream,
            keep=self._config.delta,
        )
        sending = asyncio.ensure_future(self._ranks.on_all(self._limit, SendingRank.shard_send, request))
        attempt.tasks = {"trainer": sending}
        return sending, {engine.url: self._receive_request(engine, request, patience) for engine in engines}

    def _receive_request(self, engine: ServingEngine, sent: SendRequest, patience: float) -> ReceiveRequest:
        """What an engine's ranks need to receive what the trainer ranks send."""
        plan, feed, (host, port) = self._plans[engine.plan], cast(Feed, engine.feed), sent.meeting_point
        base = sent.bases.get(engine.plan, "")
        rendezvous = Rendezvous(
            name=engine.links,
            host=host,
            port=port,
            own_host=urlsplit(engine.url).hostname or "",
            sources=tuple(self._layout.topology.rank_of(feed.replicas, source) for source in plan.sources),
            engine_ranks=plan.engine_ranks,
            backend=self._backend,
            seconds=self._join,
        )
        return ReceiveRequest(
            attempt=sent.attempt,
            kind=engine.plan,
            rendezvous=rendezvous,
            base=base,
            # The digest goes ahead of a bucket that is used on arrival, or whose size is not known in advance.
            headers=sent.stream or bool(base),
            timeout=sent.timeout,
            stall=sent.stall,
            patience=patience,
        )

    def _note_sent(self, reports: Sequence[SendReport], attempt: Attempt) -> None:
        """Keeps the times of a finished `send`."""
        for activity in ("join", "pack", "wire", "confirm"):
            attempt.note(activity, max(report.seconds[activity] for report in reports))
        for report in reports:
            for confirmation in report.confirmed:
                attempt.note("digest", confirmation.seconds)

    async def _commit(self, engine: ServingEngine, name: str, attempt: Attempt) -> None:
        """Pauses one engine until what it has staged is live."""
        await engine.pause(attempt)
        await engine.load(CommitRequest(name, engine.plan), attempt)
        await self._resume(engine, attempt)

    async def _stream(self, engines: Sequence[ServingEngine], name: str, attempt: Attempt) -> int:
        """Pauses the engines for the whole transfer; each loads buckets as they arrive."""
        await call_each(engines, lambda engine: engine.pause(attempt))
        sending, requests = await self._start_sending(engines, name, {}, attempt, stream=True)
        for engine in engines:
            request = CommitRequest(name, engine.plan, requests[engine.url])
            attempt.tasks[engine.url] = asyncio.ensure_future(engine.load(request, attempt))
        await attempt.wait_for_tasks(self._seconds + 2 * GRACE_SECONDS, every=True)
        self._note_sent(sending.result(), attempt)
        self._drop_broken_links(engines, attempt)
        await call_each(engines, lambda engine: self._resume(engine, attempt))
        return sum(report.bytes for report in sending.result())

    # Clean-up

    async def _clean_up(self, attempt: Attempt) -> None:
        """Ends calls, and the links that failed; `_release` drops what is staged over those."""
        if attempt.tasks:
            await asyncio.wait(attempt.tasks.values(), timeout=self._join + GRACE_SECONDS)
        trainer = attempt.tasks.get("trainer")
        if trainer is not None and (not trainer.done() or trainer.cancelled() or trainer.exception()):
            # What each rank did is not known.
            await self._leave_all()
        elif trainer is not None:
            engines = [engine for url, engine in self._servers.items() if url in attempt.tasks]
            if broken := self._drop_broken_links(engines, attempt):
                await self._leave_ranks(SendingRank.shard_leave, broken)
        for task in attempt.tasks.values():
            task.cancel()
        await asyncio.gather(*attempt.tasks.values(), return_exceptions=True)

    async def _leave_all(self) -> None:
        """Closes all links at the ranks."""
        self._meeting_point = None
        for engine in self._servers.values():
            engine.links = ""
        await self._leave_ranks(SendingRank.shard_leave)

    async def _release(self, server: ServingEngine, attempt: Attempt) -> None:
        # What is staged over sound links is replaced by the next version, and never committed.
        if not server.links:
            attempt.progress[server.url].lost |= not await server.drop(self._join + GRACE_SECONDS)
        await super()._release(server, attempt)
