"""Publishing a version shard to shard: the driver's side, over servers that carry megasync's plugin.

    connect → stage ─────────────→ commit, each server by itself → verify
    (trace, plan;  while servers     pause → begin → copy → end → continue
     new ones)     go on generating

A server generates only while it holds exactly one version. Until its commit it goes on with the one before, whatever
fails; a commit copies what has been verified already. A server that fails inside its commit stays paused, alone, until
a later publish has brought it a whole version (`quarantined`). With ``sync.wave`` the servers are updated a few at a
time; nothing ever pauses all of them together.

Every phase has a deadline of ``timeouts.weight_sync`` seconds, and every message one of ``timeouts.sync_stall``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megasync.errors import SyncError
from megasync.layout.digest import combine
from megasync.layout.layout import Layout
from megasync.serving.engine_control import EngineControl
from megasync.sync.attempt import Attempt, PhaseFailed, Standing, SyncReport, chosen, each
from megasync.sync.served import RECOVERY_SECONDS
from megasync.sync.shard.engine import Engine
from megasync.sync.shard.plan import ShardPlan, plan_shards, receive_program

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.serving.control import ServerControl
    from megasync.sync.broadcast.sync import TrainerRanks

log = logging.getLogger(__name__)

# The ranks keep their own deadline; the driver waits a little longer, so that it hears their reason.
GRACE_SECONDS = 5.0
# For links to be made, when everybody who makes them has been asked at the same time. Nothing wakes who waits there.
JOIN_SECONDS = 30.0


class ShardSync:
    """Publishes versions to a changing set of servers; one publish at a time.

    Args:
        ranks: every trainer rank, in rank order; a method ``shard_x`` is `ShardSender.x` on each of them.
        dtype: the trainer's parameter dtype.
        backend: of the links, "gloo" or "nccl".
    """

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
        self._ranks = ranks
        self._layout = layout
        self._dtype = dtype
        self._backend = backend
        self._config = config
        self._seconds = timeouts.weight_sync
        self._stall = timeouts.sync_stall
        self._join = max(self._stall, min(self._seconds, JOIN_SECONDS))
        self._parcel_bytes = config.bucket_mb * 2**20
        self._arena_bytes = None if config.arena_mb is None else config.arena_mb * 2**20
        self._quarantined: dict[str, str] = {}
        self._engines: dict[str, Engine] = {}
        for server in servers:
            self.add(server)
        self._plans: dict[str, ShardPlan] = {}
        # Of each kind of engine, the attempt against which the ranks can send deltas.
        self._bases: dict[str, str] = {}
        self._meeting_point: tuple[str, int] | None = None
        self._run = secrets.token_hex(4)
        self._attempts = 0
        self._links_made = 0
        self._lock = asyncio.Lock()

    @property
    def quarantined(self) -> dict[str, str]:
        """Servers that a failed commit left paused, with the reason."""
        return dict(self._quarantined)

    def add(self, server: ServerControl) -> None:
        """From the next publish on this server is updated too: all of it, whatever it holds now."""
        self._quarantined.pop(server.url, None)
        self._engines[server.url] = Engine(EngineControl(server), self._config.pause_mode, self._seconds)

    def remove(self, url: str) -> None:
        """The server is no longer updated."""
        self._engines.pop(url, None)
        self._quarantined.pop(url, None)

    def forget_ranks(self) -> None:
        """The trainer ranks are new processes: they are told of every engine again, and links are made anew."""
        self._meeting_point = None
        self._plans.clear()
        self._bases.clear()
        for engine in self._engines.values():
            engine.kind = ""

    async def connect(self) -> None:
        """Traces and plans for every server that is new; nothing is paused. `publish` does it when needed.

        Raises:
            PublishError: a server or a rank did not answer, or their layouts do not fit each other.
        """
        async with self._lock:
            attempt = self._new_attempt(0)
            try:
                await self._connect(attempt, chosen(self._engines, None))
            except Exception as error:
                raise attempt.error(error, self._quarantined) from error

    async def publish(self, version: int, only: Collection[str] | None = None) -> SyncReport:
        """Moves the trainer's weights into every server as ``version``; returns once each of them reports it.

        Args:
            only: URLs of the servers to bring to the version, when the others have it already.

        Raises:
            PublishError: names the servers, the phase and the version, and says which servers stay paused. Servers that
                had committed serve the version, all others the one before; publishing again brings them together.
        """
        async with self._lock:
            attempt = self._new_attempt(version)
            name = f"{version}-{self._run}-{self._attempts}"
            moved = 0
            try:
                engines = chosen(self._engines, only)
                await self._connect(attempt, engines)
                size = self._config.wave or max(1, len(engines))
                for first in range(0, len(engines), size):
                    moved += await self._update(engines[first : first + size], f"{name}.{first}", attempt)
            except BaseException as error:
                await self._abandon(attempt)
                if not isinstance(error, Exception):
                    raise
                raise attempt.error(error, self._quarantined) from error
        log.info("published version %d: %s", version, attempt.seconds)
        return SyncReport(version, tuple(engine.url for engine in engines), moved, attempt.seconds)

    async def close(self) -> None:
        """Leaves the links on both sides. Servers go on with what they serve."""
        async with self._lock:
            await self._abandon(self._new_attempt(0))

    def _new_attempt(self, version: int) -> Attempt:
        self._attempts += 1
        return Attempt(version, {url: Standing() for url in self._engines})

    # Connect

    async def _connect(self, attempt: Attempt, engines: Sequence[Engine]) -> None:
        """Brings every engine that is new, or was restarted, to where it can stage."""

        async def prepare(engine: Engine) -> None:
            if await engine.is_new():
                await self._plan_for(engine)

        with attempt.during("connect"):
            await each(engines, prepare)

    async def _plan_for(self, engine: Engine) -> None:
        # A driver that died may have left it receiving.
        await engine.drop(self._join + GRACE_SECONDS)
        traced = await engine.trace(list(self._layout.hf_tensors.items()))
        kind = hashlib.sha256("".join(rank.digest() for rank in traced).encode()).hexdigest()[:16]
        if kind not in self._plans:
            self._plans[kind] = await asyncio.to_thread(
                plan_shards, self._layout, traced, self._parcel_bytes, self._dtype
            )
        found = [rank.to_json() for rank in traced]
        derived = await self._ranks.call("shard_prepare", kind, found, timeout=self._seconds)
        other = [rank for rank, digest in enumerate(derived) if digest != self._plans[kind].digest]
        if other:
            raise SyncError(f"trainer ranks {other} derived another plan than the driver; their configurations differ")
        program = {
            "digest": kind,
            "parcels": [receive_program(self._plans[kind], tp) for tp in range(len(traced))],
            "fills": [rank["fills"] for rank in found],
            "arena": self._config.arena,
            "arena_bytes": self._arena_bytes,
        }
        await engine.take_program(kind, program)

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
                await each(staging, lambda engine: self._commit(engine, name, attempt))
        if streaming:
            with attempt.during("stream"):
                moved += await self._stream(streaming, name + "s", attempt)
        with attempt.during("verify"):
            await each(wave, lambda engine: engine.verify(attempt))
        return moved

    async def _stage(self, engines: Sequence[Engine], name: str, attempt: Attempt) -> int:
        """All engines receive the version beside the one that they serve, and the digests of both ends agree."""
        bases = self._common_bases(engines)
        await self._start_sending(engines, name, bases, attempt, stream=False)
        await each(engines, lambda engine: engine.stage(self._request(engine, engines, name, bases, stream=False)))
        for engine in engines:
            attempt.tasks[engine.url] = asyncio.ensure_future(
                engine.staged(name, self._plans[engine.kind].engine_ranks, attempt.tasks["trainer"])
            )
        await attempt.together(self._seconds + 2 * GRACE_SECONDS)
        sent = self._note_sent(name, attempt)
        for engine in engines:
            received = attempt.tasks[engine.url].result()
            if received != (expected := list(sent[engine.kind].values())):
                raise PhaseFailed({engine.url: SyncError(f"it received digests {received}, but {expected} were sent")})
            engine.base = name if self._config.delta else ""
        return _bytes_sent(attempt)

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
    ) -> None:
        """Has the ranks send; the trainer's task of the attempt ends with `ShardSender.send` on each rank."""
        limit = self._seconds + GRACE_SECONDS
        if self._meeting_point is None:
            points = await self._ranks.call("shard_listen", self._seconds, timeout=limit)
            self._meeting_point = next(point for point in points if point is not None)
        for engine in engines:
            if not engine.links:
                self._links_made += 1
                engine.links = f"megasync-{self._run}-{self._links_made}"
            # Until it has received everything, its arena holds parts of two versions.
            engine.base = ""
        request = {
            "attempt": name,
            "timeout": self._seconds,
            "stall": self._stall,
            "meeting_point": self._meeting_point,
            "engines": [{"name": engine.links, "kind": engine.kind, "url": engine.url} for engine in engines],
            "links": [engine.links for engine in self._engines.values()],
            "join": {kind: self._join_seconds(kind, engines) for kind in {engine.kind for engine in engines}},
            "bases": bases,
            "stream": stream,
            "keep": self._config.delta,
        }
        sending = self._ranks.call("shard_send", request, timeout=limit)
        attempt.tasks = {"trainer": asyncio.ensure_future(sending)}

    def _join_seconds(self, kind: str, engines: Sequence[Engine]) -> float:
        """For the links of one kind. Ranks send to one kind after another, so only the first is joined at once."""
        return self._join if kind == min(engine.kind for engine in engines) else self._seconds

    def _request(
        self, engine: Engine, engines: Sequence[Engine], name: str, bases: dict[str, str], *, stream: bool
    ) -> dict[str, Any]:
        """What an engine's ranks need to receive an attempt, which goes to these ``engines``."""
        base = bases.get(engine.kind, "")
        plan, (host, port) = self._plans[engine.kind], self._meeting_point
        return {
            "attempt": name,
            "program": engine.kind,
            "name": engine.links,
            "host": host,
            "port": port,
            "join": self._join_seconds(engine.kind, engines),
            "own_host": urlsplit(engine.url).hostname,
            "sources": plan.sources,
            "engine_ranks": plan.engine_ranks,
            "backend": self._backend,
            "base": base,
            "stream": stream,
            # A parcel that is used at once, or whose size is not known before, has its digest sent ahead.
            "headers": stream or bool(base),
            "timeout": self._seconds,
            "stall": self._stall,
        }

    def _note_sent(self, name: str, attempt: Attempt) -> dict[str, dict[int, int]]:
        """Keeps times and bases of a finished `send`; kind -> engine rank -> digest of all that was sent to it."""
        results = attempt.tasks["trainer"].result()
        for activity in ("pack", "wire", "confirm"):
            attempt.note(activity, max(result["seconds"][activity] for result in results))
        for result in results:
            for *_, seconds in result["confirmed"]:
                attempt.note("digest", seconds)
        found: dict[str, dict[int, dict[int, int]]] = {}
        for result in results:
            for kind, tp, tag, value in result["digests"]:
                found.setdefault(kind, {}).setdefault(tp, {})[tag] = value
        if self._config.delta:
            self._bases |= dict.fromkeys(found, name)
        return {kind: {tp: combine(parts) for tp, parts in sorted(by_tp.items())} for kind, by_tp in found.items()}

    async def _commit(self, engine: Engine, name: str, attempt: Attempt) -> None:
        """Pauses one engine for the local copy of what it has staged."""
        await engine.pause(attempt)
        await engine.load({"attempt": name, "program": engine.kind}, attempt)
        await self._go_on(engine, attempt)

    async def _stream(self, engines: Sequence[Engine], name: str, attempt: Attempt) -> int:
        """Pauses the engines for the whole transfer; each loads parcels as they come."""
        await each(engines, lambda engine: engine.pause(attempt))
        await self._start_sending(engines, name, {}, attempt, stream=True)
        for engine in engines:
            body = self._request(engine, engines, name, {}, stream=True)
            attempt.tasks[engine.url] = asyncio.ensure_future(engine.load(body, attempt))
        await attempt.together(self._seconds + 2 * GRACE_SECONDS)
        self._note_sent(name, attempt)
        await each(engines, lambda engine: self._go_on(engine, attempt))
        return _bytes_sent(attempt)

    async def _go_on(self, engine: Engine, attempt: Attempt) -> None:
        await engine.go_on(attempt)
        self._quarantined.pop(engine.url, None)

    # Clean-up

    async def _abandon(self, attempt: Attempt) -> None:
        """Ends what an attempt left behind: calls, links, staged parts, pauses. Nothing here raises."""
        trainer = attempt.tasks.get("trainer")
        if trainer is not None and not trainer.done():
            await asyncio.wait([trainer], timeout=self._join + GRACE_SECONDS)
        self._meeting_point = None
        leaving = self._ranks.call("shard_leave", timeout=RECOVERY_SECONDS)
        for failure in await asyncio.gather(leaving, return_exceptions=True):
            if isinstance(failure, BaseException):
                log.warning("not every trainer rank left the sync links: %s", failure)
        for task in attempt.tasks.values():
            task.cancel()
        await asyncio.gather(*attempt.tasks.values(), return_exceptions=True)
        ours = [engine for url, engine in self._engines.items() if url in attempt.standing]
        await asyncio.gather(*(self._release(engine, attempt) for engine in ours))

    async def _release(self, engine: Engine, attempt: Attempt) -> None:
        attempt.standing[engine.url].lost |= not await engine.drop(self._join + GRACE_SECONDS)
        if reason := await engine.release(attempt, engine.url in self._quarantined):
            self._quarantined[engine.url] = reason


def _bytes_sent(attempt: Attempt) -> int:
    return sum(result["bytes"] for result in attempt.tasks["trainer"].result())
