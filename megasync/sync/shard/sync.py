"""Shard-to-shard publishing: the driver's side, over servers that carry megasync's plugin.

    connect → stage ─────────────→ commit, each server alone → verify
    (trace, plan;  while servers     pause → begin → copy → end → continue
     new servers)  generate

A server generates only while it holds exactly one version. Until its commit it serves the previous one, whatever
fails; a commit copies what has been verified already. A server that fails inside its commit stays paused, alone, until
a later publish has brought it a complete version (`quarantined`). ``sync.wave`` limits how many servers are updated at
a time; nothing ever pauses all of them together.

Replicas of the trainer are assigned to servers (`shard.feeds`), and each server has links to those alone. Links live
until they fail: a failure of one server or of its links costs no other server its links.

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
from megasync.sync.attempt import Attempt, PhaseFailed, call_each
from megasync.sync.messages import (
    CommitRequest,
    ReceivePlanRequest,
    ReceiveRequest,
    Rendezvous,
    SendReport,
    SendRequest,
    ServerLinks,
)
from megasync.sync.shard.feeds import WHOLE, Feed, assign_feeds
from megasync.sync.shard.plan import MOST_SOURCES, ShardPlan, plan_shards, receive_plan
from megasync.sync.shard.server import ShardServer
from megasync.sync.weight_sync import GRACE_SECONDS, SendingRank, TrainerRanks, WeightSync

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# Seconds to make all missing links. A failure at one end does not end the other's wait.
JOIN_SECONDS = 60.0

Sending = asyncio.Future[list[SendReport]]


class ShardSync(WeightSync[ShardServer]):
    """Publishes versions from shard to shard: nothing is gathered anywhere.

    A method ``shard_x`` of the ranks is `ShardSender.x` on each of them. ``dtype`` is that of the trainer's parameters,
    ``backend`` that of the links, "gloo" or "nccl".
    """

    _update_type = ShardServer

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
        arena_bytes = None if config.arena_mb is None else config.arena_mb * 2**20
        self._arena_bytes = arena_bytes if stages else 0
        self._plans: dict[str, ShardPlan] = {}
        # By plan, the attempt against which the ranks can send deltas.
        self._bases: dict[str, str] = {}
        self._meeting_point: tuple[str, int] | None = None
        self._run = secrets.token_hex(4)
        self._attempts = 0
        self._links_made = 0

    def forget_ranks(self, data_parallel: int) -> None:
        """The trainer ranks are new processes: they learn about every server again, and new links are made."""
        if data_parallel != self._layout.topology.data:
            self._layout = self._layout.on(replace(self._layout.topology, data=data_parallel))
            for server in self._servers.values():
                server.feed = None
        self._meeting_point = None
        self._plans.clear()
        self._bases.clear()
        for server in self._servers.values():
            server.forget()

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
            await asyncio.gather(*(self._release(server, attempt) for server in self._involved(attempt)))

    async def _move(self, servers: list[ShardServer], attempt: Attempt, *, everywhere: bool) -> int:
        """After a failure, servers that had committed serve the version, all others the previous one; the next publish
        brings them together.
        """
        await self._connect(servers, attempt)
        self._attempts += 1
        name = f"{attempt.version}-{self._run}-{self._attempts}"
        size = self._config.wave or max(1, len(servers))
        moved = 0
        for first in range(0, len(servers), size):
            moved += await self._update(servers[first : first + size], f"{name}.{first}", attempt)
        return moved

    # Connect

    async def _connect(self, servers: list[ShardServer], attempt: Attempt) -> None:
        """Prepares every server that is new, or was restarted, for staging."""
        new: list[ShardServer] = []
        traced: dict[str, list[EngineRank]] = {}

        async def trace(server: ShardServer) -> None:
            if await server.is_new():
                frozen = self._layout.frozen_tensors
                specs = [*self._layout.hf_tensors.items(), *frozen.items()]
                ranks = await server.trace(specs, self._join + GRACE_SECONDS)
                traced[server.signature] = [rank.without(frozen) for rank in ranks]
                new.append(server)

        with attempt.during("connect"):
            await call_each(servers, trace)
            # In the order of the servers, which does not depend on who answered first.
            by_plan: dict[str, list[ShardServer]] = {}
            for server in (server for server in servers if server in new):
                by_plan.setdefault(await self._assign(server, new, traced[server.signature]), []).append(server)
            for plan, alike in by_plan.items():
                await self._plan_for(plan, alike, traced[alike[0].signature])

    async def _assign(self, server: ShardServer, new: Sequence[ShardServer], ranks: Sequence[EngineRank]) -> str:
        """Decides which replicas feed a new server; the name of its plan."""
        if server.feed is None:
            alike = [other for other in new if other.signature == server.signature and other.feed is None]
            single = await self._make_plan(server.signature, alike, ranks, (WHOLE,))
            sources = max(len(single.sources_of(tp)) for tp in range(single.engine_ranks))
            present = [other.feed for other in self._servers.values() if other.feed]
            replicas, most = self._layout.topology.replicas, max(1, MOST_SOURCES // sources)
            feeds = assign_feeds(present, len(alike), replicas, min(most, replicas))
            for other, feed in zip(sorted(alike, key=list(self._servers.values()).index), feeds, strict=True):
                other.feed = feed
        assert server.feed is not None
        shares = server.feed.shares
        return server.signature if len(shares) == 1 else f"{server.signature}-{'-'.join(map(str, shares))}"

    async def _make_plan(
        self, name: str, servers: Sequence[ShardServer], ranks: Sequence[EngineRank], shares: Sequence[int]
    ) -> ShardPlan:
        if name not in self._plans:
            layout = self._layout.with_replicas(len(shares))
            try:
                self._plans[name] = await asyncio.to_thread(
                    plan_shards, layout, ranks, self._bucket_bytes, self._dtype, shares
                )
            except SyncError as error:
                raise PhaseFailed({server.url: error for server in servers}) from error
        return self._plans[name]

    async def _plan_for(self, name: str, servers: Sequence[ShardServer], ranks: Sequence[EngineRank]) -> None:
        """Has the trainer ranks that feed these servers, which share a plan, and the servers themselves prepare it."""
        feeds = [server.feed for server in servers if server.feed]
        plan = await self._make_plan(name, servers, ranks, feeds[0].shares)
        topology, feeding = self._layout.topology, sorted({replica for feed in feeds for replica in feed.replicas})
        derived = await self._ranks.on_all(
            self._seconds, SendingRank.shard_prepare, name, ranks, feeds[0].shares, feeding
        )
        other = [rank for rank, digest in enumerate(derived) if digest and digest != plan.digest]
        if other:
            raise SyncError(f"trainer ranks {other} derived another plan than the driver; their configurations differ")

        async def inform(server: ShardServer) -> None:
            feed = cast(Feed, server.feed)
            plans = tuple(
                receive_plan(plan, tp, name, rank.fills, feed.turn, partial(topology.rank_of, feed.replicas))
                for tp, rank in enumerate(ranks)
            )
            config = self._config
            request = ReceivePlanRequest(plans, config.arena, self._arena_bytes, config.delta)
            await server.take_receive_plan(name, request)

        await call_each(servers, inform)

    # Stage and commit

    async def _update(self, wave: Sequence[ShardServer], name: str, attempt: Attempt) -> int:
        """Brings one wave of servers to the new version; bytes that went over the wire."""
        staging = [server for server in wave if server.stages]
        streaming = [server for server in wave if not server.stages]
        moved = 0
        if staging:
            with attempt.during("stage"):
                moved += await self._stage(staging, name, attempt)
            with attempt.during("commit"):
                await call_each(staging, lambda server: self._commit(server, name, attempt))
        if streaming:
            with attempt.during("stream"):
                moved += await self._stream(streaming, name + "s", attempt)
        with attempt.during("verify"):
            await call_each(wave, lambda server: server.verify(attempt))
        return moved

    async def _stage(self, servers: Sequence[ShardServer], name: str, attempt: Attempt) -> int:
        """All servers receive the version beside the one that they serve, and the digests of both ends agree."""
        sending, requests = await self._start_sending(servers, name, self._common_bases(servers), attempt, stream=False)

        async def receive(server: ShardServer) -> list[int]:
            if not await server.stage(requests[server.url]):
                return []
            return await server.staged(name, self._plans[server.plan].engine_ranks, sending)

        receiving = {server.url: asyncio.ensure_future(receive(server)) for server in servers}
        attempt.tasks |= receiving
        await attempt.wait_for_tasks(self._seconds + 2 * GRACE_SECONDS, every=True)
        reports, planned = sending.result(), [server for server in servers if server.plan]
        self._note_sent(reports, attempt)
        failed = dict(item for report in reports for item in report.failed.items())
        causes: dict[str, BaseException] = {}
        for server in planned:
            received, expected = receiving[server.url].result(), self._sent_to(server, reports)
            if server.url in failed:
                causes[server.url] = SyncError(failed[server.url])
            elif received != expected:
                causes[server.url] = SyncError(f"it received digests {received}, but {expected} were sent")
        if causes:
            raise PhaseFailed(causes)
        self._drop_broken_links(planned, attempt)
        if self._config.delta:
            self._bases |= {server.plan: name for server in planned}
            for server in planned:
                server.base = name
        moved = sum(report.bytes for report in reports)
        if len(planned) < len(servers):
            # The processes of the others were restarted since the last publish.
            new = [server for server in servers if not server.plan]
            await self._connect(new, attempt)
            moved += await self._stage(new, name + "n", attempt)
        return moved

    def _sent_to(self, server: ShardServer, reports: Sequence[SendReport]) -> list[int]:
        """By engine rank, the digest of all that was sent to it."""
        plan, feed = self._plans[server.plan], cast(Feed, server.feed)
        digests = [0] * plan.engine_ranks
        for source in plan.sources:
            for sent in reports[self._layout.topology.rank_of(feed.replicas, source)].digests:
                if (sent.plan, sent.source) == (server.plan, source):
                    digests[sent.engine_rank] = (digests[sent.engine_rank] + sent.digest) & MASK
        return digests

    def _drop_broken_links(self, servers: Iterable[ShardServer], attempt: Attempt) -> list[str]:
        """Forgets the links over which not everything went as it should; their names. A publish makes new ones."""
        reports = attempt.tasks["trainer"].result()
        failed = {url for report in reports for url in report.failed}
        confirmed = Counter(rank.url for report in reports for rank in report.confirmed)
        broken: list[str] = []
        for server in servers:
            task = attempt.tasks[server.url]
            fine = task.done() and not task.cancelled() and task.exception() is None and server.url not in failed
            if not fine or (server.stages and confirmed[server.url] < self._plans[server.plan].engine_ranks):
                broken.append(server.links)
                server.links = ""
        return broken

    def _common_bases(self, servers: Sequence[ShardServer]) -> dict[str, str]:
        """Plan -> the attempt against which deltas are sent: one that the ranks and all its servers hold, or none."""
        due = self._config.delta_full_every
        if not self._config.delta or (due and self._attempts % due == 0):
            return {}
        held: dict[str, set[str]] = {}
        for server in servers:
            held.setdefault(server.plan, set()).add(server.base)
        return {plan: self._bases[plan] for plan, bases in held.items() if bases == {self._bases.get(plan)}}

    async def _start_sending(
        self, servers: Sequence[ShardServer], name: str, bases: dict[str, str], attempt: Attempt, *, stream: bool
    ) -> tuple[Sending, dict[str, ReceiveRequest]]:
        """Has the ranks send; the trainer's task of the attempt ends with `ShardSender.send` on each rank.

        Returns that task, and by URL what the ranks of each server need to receive it.
        """
        if (meeting_point := self._meeting_point) is None:
            points = await self._ranks.on_all(self._limit, SendingRank.shard_listen, self._seconds)
            self._meeting_point = meeting_point = next(point for point in points if point is not None)
        patience = 0.0
        for server in servers:
            if not server.links:
                self._links_made += 1
                server.links = f"megasync-{self._run}-{self._links_made}"
                patience = self._join
            # Until it has received everything, its arena holds parts of two versions.
            server.base = ""
        request = SendRequest(
            attempt=name,
            timeout=self._seconds,
            stall=self._stall,
            meeting_point=meeting_point,
            servers=tuple(
                ServerLinks(server.links, server.plan, server.url, cast(Feed, server.feed).replicas)
                for server in servers
            ),
            links=tuple(server.links for server in self._servers.values()),
            join=self._join,
            bases=bases,
            stream=stream,
            keep=self._config.delta,
        )
        sending = asyncio.ensure_future(self._ranks.on_all(self._limit, SendingRank.shard_send, request))
        attempt.tasks = {"trainer": sending}
        return sending, {server.url: self._receive_request(server, request, patience) for server in servers}

    def _receive_request(self, server: ShardServer, sent: SendRequest, patience: float) -> ReceiveRequest:
        """Makes the request by which a server's ranks receive what the trainer ranks send."""
        plan, feed, (host, port) = self._plans[server.plan], cast(Feed, server.feed), sent.meeting_point
        base = sent.bases.get(server.plan, "")
        rendezvous = Rendezvous(
            name=server.links,
            host=host,
            port=port,
            own_host=urlsplit(server.url).hostname or "",
            sources=tuple(self._layout.topology.rank_of(feed.replicas, source) for source in plan.sources),
            engine_ranks=plan.engine_ranks,
            backend=self._backend,
            seconds=self._join,
        )
        return ReceiveRequest(
            attempt=sent.attempt,
            plan=server.plan,
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

    async def _commit(self, server: ShardServer, name: str, attempt: Attempt) -> None:
        """Pauses one server until what it has staged is live."""
        await server.pause(attempt)
        await server.load(CommitRequest(name, server.plan), attempt)
        await self._resume(server, attempt)

    async def _stream(self, servers: Sequence[ShardServer], name: str, attempt: Attempt) -> int:
        """Pauses the servers for the whole transfer; each loads buckets as they arrive."""
        await call_each(servers, lambda server: server.pause(attempt))
        sending, requests = await self._start_sending(servers, name, {}, attempt, stream=True)
        for server in servers:
            request = CommitRequest(name, server.plan, requests[server.url])
            attempt.tasks[server.url] = asyncio.ensure_future(server.load(request, attempt))
        await attempt.wait_for_tasks(self._seconds + 2 * GRACE_SECONDS, every=True)
        self._note_sent(sending.result(), attempt)
        self._drop_broken_links(servers, attempt)
        await call_each(servers, lambda server: self._resume(server, attempt))
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
            servers = [server for url, server in self._servers.items() if url in attempt.tasks]
            if broken := self._drop_broken_links(servers, attempt):
                await self._leave_ranks(SendingRank.shard_leave, broken)
        for task in attempt.tasks.values():
            task.cancel()
        await asyncio.gather(*attempt.tasks.values(), return_exceptions=True)

    async def _leave_all(self) -> None:
        """Closes all links at the ranks."""
        self._meeting_point = None
        for server in self._servers.values():
            server.links = ""
        await self._leave_ranks(SendingRank.shard_leave)

    async def _release(self, server: ShardServer, attempt: Attempt) -> None:
        # What is staged over sound links is replaced by the next version, and never committed.
        if not server.links:
            attempt.progress[server.url].lost |= not await server.drop(self._join + GRACE_SECONDS)
        await super()._release(server, attempt)
