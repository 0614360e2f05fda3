"""Shard-to-shard publishing: the driver's side, over servers that carry megasync's plugin.

    connect → stage ─────────────→ commit, each server alone → verify
    (trace, plan;  while servers     pause → begin → copy → end → continue
     new servers)  generate

A server generates only while it holds exactly one version. Until its commit it serves the previous one, whatever
fails; a commit copies what has been verified already. A server that fails inside its commit stays paused, alone, until
a later publish has brought it a complete version (`quarantined`). ``sync.wave`` limits how many servers are updated at
a time; nothing ever pauses all of them together.

Every phase has a deadline of ``timeouts.weight_sync`` seconds, and every message one of ``timeouts.sync_stall``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megasync.errors import SyncError
from megasync.layout.digest import combine
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
from megasync.sync.shard.engine import Engine
from megasync.sync.shard.plan import ShardPlan, plan_shards, receive_plan
from megasync.sync.weight_sync import GRACE_SECONDS, TrainerRanks, WeightSync

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# Seconds to make links when both ends were asked at the same time. A failure at one end does not end the other's wait.
JOIN_SECONDS = 30.0

Sending = asyncio.Future[list[SendReport]]


class ShardSync(WeightSync[Engine]):
    """Publishes versions from shard to shard: nothing is gathered anywhere.

    A method ``shard_x`` of the ranks is `ShardSender.x` on each of them. ``dtype`` is that of the trainer's parameters,
    ``backend`` that of the links, "gloo" or "nccl".
    """

    _update_type = Engine

    def __init__(
        self,
        servers: Sequence[ServerControl],
        ranks: TrainerRanks,
        layout: Layout,
        dtype: str,
        backend: str,
        config: SyncConfig,
        timeouts: TimeoutConfig,
    ) -> None:
        super().__init__(servers, ranks, config, timeouts)
        self._layout = layout
        self._dtype = dtype
        self._backend = backend
        self._config = config
        self._stall = timeouts.sync_stall
        self._join = max(self._stall, min(self._seconds, JOIN_SECONDS))
        self._bucket_bytes = config.bucket_mb * 2**20
        self._arena_bytes = None if config.arena_mb is None else config.arena_mb * 2**20
        self._plans: dict[str, ShardPlan] = {}
        # By kind of engine, the attempt against which the ranks can send deltas.
        self._bases: dict[str, str] = {}
        self._meeting_point: tuple[str, int] | None = None
        self._run = secrets.token_hex(4)
        self._attempts = 0
        self._links_made = 0

    def forget_ranks(self) -> None:
        """The trainer ranks are new processes: they learn about every engine again, and new links are made."""
        self._meeting_point = None
        self._plans.clear()
        self._bases.clear()
        for engine in self._servers.values():
            engine.kind = ""

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
            await self._clean_up(attempt)
            await asyncio.gather(*(self._release(engine, attempt) for engine in self._involved(attempt)))

    def _new_attempt(self, version: int) -> Attempt:
        self._attempts += 1
        return super()._new_attempt(version)

    async def _move(self, servers: list[Engine], attempt: Attempt, *, everywhere: bool) -> int:
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

    async def _connect(self, servers: list[Engine], attempt: Attempt) -> None:
        """Prepares every engine that is new, or was restarted, for staging."""

        async def prepare(engine: Engine) -> None:
            if await engine.is_new():
                await self._plan_for(engine)

        with attempt.during("connect"):
            await call_each(servers, prepare)

    async def _plan_for(self, engine: Engine) -> None:
        # A driver that died may have left it receiving.
        await engine.drop(self._join + GRACE_SECONDS)
        ranks = await engine.control.trace(self._layout.hf_tensors.items(), self._seconds)
        kind = hashlib.sha256("".join(rank.digest() for rank in ranks).encode()).hexdigest()[:16]
        if kind not in self._plans:
            self._plans[kind] = await asyncio.to_thread(
                plan_shards, self._layout, ranks, self._bucket_bytes, self._dtype
            )
        plan = self._plans[kind]
        derived = await self._ranks.call("shard_prepare", kind, ranks, timeout=self._seconds)
        other = [rank for rank, digest in enumerate(derived) if digest != plan.digest]
        if other:
            raise SyncError(f"trainer ranks {other} derived another plan than the driver; their configurations differ")
        plans = tuple(receive_plan(plan, tp, kind, rank.fills) for tp, rank in enumerate(ranks))
        request = ReceivePlanRequest(plans, self._config.arena, self._arena_bytes)
        await engine.take_receive_plan(kind, request)

    # Stage and commit

    async def _update(self, wave: Sequence[Engine], name: str, attempt: Attempt) -> int:
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

    async def _stage(self, engines: Sequence[Engine], name: str, attempt: Attempt) -> int:
        """All engines receive the version beside the one that they serve, and the digests of both ends agree."""
        bases = self._common_bases(engines)
        sending, requests = await self._start_sending(engines, name, bases, attempt, stream=False)
        await call_each(engines, lambda engine: engine.stage(requests[engine.url]))
        receiving = {
            engine.url: asyncio.ensure_future(engine.staged(name, self._plans[engine.kind].engine_ranks, sending))
            for engine in engines
        }
        attempt.tasks |= receiving
        await attempt.wait_for_tasks(self._seconds + 2 * GRACE_SECONDS)
        sent = self._note_sent(name, sending.result(), attempt)
        for engine in engines:
            received, expected = receiving[engine.url].result(), list(sent[engine.kind].values())
            if received != expected:
                raise PhaseFailed({engine.url: SyncError(f"it received digests {received}, but {expected} were sent")})
            engine.base = name if self._config.delta else ""
        return sum(report.bytes for report in sending.result())

    def _common_bases(self, engines: Sequence[Engine]) -> dict[str, str]:
        """Kind -> the attempt against which deltas are sent: one that the ranks and all its engines hold, or none."""
        due = self._config.delta_full_every
        if not self._config.delta or (due and self._attempts % due == 0):
            return {}
        held: dict[str, set[str]] = {}
        for engine in engines:
            held.setdefault(engine.kind, set()).add(engine.base)
        return {kind: self._bases[kind] for kind, bases in held.items() if bases == {self._bases.get(kind)}}

    async def _start_sending(
        self, engines: Sequence[Engine], name: str, bases: dict[str, str], attempt: Attempt, *, stream: bool
    ) -> tuple[Sending, dict[str, ReceiveRequest]]:
        """Has the ranks send; the trainer's task of the attempt ends with `ShardSender.send` on each rank.

        Returns that task, and by URL what the ranks of each engine need to receive it.
        """
        if (meeting_point := self._meeting_point) is None:
            points = await self._ranks.call("shard_listen", self._seconds, timeout=self._limit)
            self._meeting_point = meeting_point = next(point for point in points if point is not None)
        for engine in engines:
            if not engine.links:
                self._links_made += 1
                engine.links = f"megasync-{self._run}-{self._links_made}"
            # Until it has received everything, its arena holds parts of two versions.
            engine.base = ""
        # Ranks send to one kind after another, so only the links of the first are made at once.
        first, *others = sorted({engine.kind for engine in engines})
        request = SendRequest(
            attempt=name,
            timeout=self._seconds,
            stall=self._stall,
            meeting_point=meeting_point,
            engines=tuple(EngineLinks(engine.links, engine.kind, engine.url) for engine in engines),
            links=tuple(engine.links for engine in self._servers.values()),
            join={first: self._join} | dict.fromkeys(others, self._seconds),
            bases=bases,
            stream=stream,
            keep=self._config.delta,
        )
        sending = asyncio.ensure_future(self._ranks.call("shard_send", request, timeout=self._limit))
        attempt.tasks = {"trainer": sending}
        return sending, {engine.url: self._receive_request(engine, request) for engine in engines}

    def _receive_request(self, engine: Engine, sent: SendRequest) -> ReceiveRequest:
        """What an engine's ranks need to receive what the trainer ranks send."""
        plan, (host, port) = self._plans[engine.kind], sent.meeting_point
        base = sent.bases.get(engine.kind, "")
        rendezvous = Rendezvous(
            name=engine.links,
            host=host,
            port=port,
            own_host=urlsplit(engine.url).hostname or "",
            sources=plan.sources,
            engine_ranks=plan.engine_ranks,
            backend=self._backend,
            seconds=sent.join[engine.kind],
        )
        return ReceiveRequest(
            attempt=sent.attempt,
            kind=engine.kind,
            rendezvous=rendezvous,
            base=base,
            # The digest goes ahead of a bucket that is used on arrival, or whose size is not known in advance.
            headers=sent.stream or bool(base),
            timeout=sent.timeout,
            stall=sent.stall,
        )

    def _note_sent(self, name: str, reports: Sequence[SendReport], attempt: Attempt) -> dict[str, dict[int, int]]:
        """Keeps times and bases of a finished `send`; kind -> engine rank -> digest of all that was sent to it."""
        for activity in ("pack", "wire", "confirm"):
            attempt.note(activity, max(report.seconds[activity] for report in reports))
        digests: dict[str, dict[int, dict[int, int]]] = {}
        for report in reports:
            for confirmation in report.confirmed:
                attempt.note("digest", confirmation.seconds)
            for sent in report.digests:
                digests.setdefault(sent.kind, {}).setdefault(sent.engine_rank, {})[sent.tag] = sent.digest
        if self._config.delta:
            self._bases |= dict.fromkeys(digests, name)
        return {kind: {tp: combine(parts) for tp, parts in sorted(by_tp.items())} for kind, by_tp in digests.items()}

    async def _commit(self, engine: Engine, name: str, attempt: Attempt) -> None:
        """Pauses one engine for the local copy of what it has staged."""
        await engine.pause(attempt)
        await engine.load(CommitRequest(name, engine.kind), attempt)
        await self._resume(engine, attempt)

    async def _stream(self, engines: Sequence[Engine], name: str, attempt: Attempt) -> int:
        """Pauses the engines for the whole transfer; each loads buckets as they arrive."""
        await call_each(engines, lambda engine: engine.pause(attempt))
        sending, requests = await self._start_sending(engines, name, {}, attempt, stream=True)
        for engine in engines:
            request = CommitRequest(name, engine.kind, requests[engine.url])
            attempt.tasks[engine.url] = asyncio.ensure_future(engine.load(request, attempt))
        await attempt.wait_for_tasks(self._seconds + 2 * GRACE_SECONDS)
        self._note_sent(name, sending.result(), attempt)
        await call_each(engines, lambda engine: self._resume(engine, attempt))
        return sum(report.bytes for report in sending.result())

    # Clean-up

    async def _clean_up(self, attempt: Attempt) -> None:
        """Ends calls and links; `_release` drops what is staged."""
        trainer = attempt.tasks.get("trainer")
        if trainer is not None and not trainer.done():
            await asyncio.wait([trainer], timeout=self._join + GRACE_SECONDS)
        self._meeting_point = None
        await self._leave_ranks("shard_leave")
        for task in attempt.tasks.values():
            task.cancel()
        await asyncio.gather(*attempt.tasks.values(), return_exceptions=True)

    async def _release(self, server: Engine, attempt: Attempt) -> None:
        attempt.progress[server.url].lost |= not await server.drop(self._join + GRACE_SECONDS)
        await super()._release(server, attempt)
