"""Publishing a version: the driver's side of a weight sync, over stock SGLang endpoints.

    connect → pause → flush → begin → transfer → end → verify → continue
    (once)            (not in_place)  per bucket       /model_info

A server generates only while it holds exactly one version: it continues after all servers have reported the new one, or,
after a failure, when nothing of the new one was loaded into it (`Standing.mixed`, asked in `_release`). A server that
took part of a failed version stays paused; the next publish that succeeds sets it free.

Each phase has a deadline of ``timeouts.weight_sync`` seconds, and the clean-up after a failure one of its own. Whatever
failed, no rank and no server that still runs is left inside a collective: the groups are closed, and made anew by the
next publish.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megasync.errors import ServerError, SyncError
from megasync.sync.plan import BroadcastPlan, Bucket, group_name

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.device import Device
    from megasync.rollout.control import ServerControl

log = logging.getLogger(__name__)

# The ranks keep their own deadline; the driver waits a little longer, so that it hears their reason.
GRACE_SECONDS = 5.0
# For each step of the clean-up after a failure. A server that does not answer by then is stuck in a collective.
RECOVERY_SECONDS = 10.0
# How long a server may take to finish the batch that was running when it was paused, before its cache is flushed.
FLUSH_WAIT_SECONDS = 10
# How SGLang begins its answer when a bucket did not arrive; the model was not touched then.
NOT_RECEIVED = "Failed to receive weights"


class TrainerRanks(Protocol):
    """All trainer ranks; methods are ``sync_listen``, ``sync_join``, ``sync_send``, ``sync_leave`` of `BroadcastSender`."""

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Results in rank order; raises when any rank failed or the time (seconds) is up."""


@dataclass(frozen=True)
class SyncReport:
    """A published version: bytes that each server received, and seconds by phase.

    ``pack`` and ``wire`` are the slowest sender's own times inside ``transfer``; they overlap.
    """

    version: int
    bytes: int
    seconds: Mapping[str, float]


class PublishError(SyncError):
    """A version that was not published. ``quarantined`` maps each server left paused to the reason."""

    def __init__(self, message: str, version: int, phase: str, engines: Sequence[str], quarantined: Mapping[str, str]):
        super().__init__(message)
        self.version = version
        self.phase = phase
        self.engines = tuple(engines)
        self.quarantined = dict(quarantined)


class _PhaseFailed(Exception):
    """What went wrong in a phase, by the URL of the server (or "trainer")."""

    def __init__(self, causes: Mapping[str, BaseException]) -> None:
        super().__init__("; ".join(f"{who}: {cause or type(cause).__name__}" for who, cause in causes.items()))
        self.causes = dict(causes)


@dataclass
class Standing:
    """What one publish has done to one server so far."""

    paused: bool = False
    begun: bool = False
    loaded: int = 0
    # A bucket was asked for and its fate is not known.
    in_flight: bool = False

    @property
    def mixed(self) -> bool:
        """True when the server may hold something else than the previous version as a whole."""
        return self.loaded > 0 or self.in_flight


@dataclass
class _Attempt:
    """One publish under way."""

    version: int
    standing: dict[str, Standing]
    phase: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = time.monotonic() - start


class WeightSync:
    """Publishes versions to a fixed set of servers; one publish at a time.

    Args:
        ranks: every trainer rank, in rank order.
        plan: the plan that the ranks' senders hold too.
        engine_tp: tensor-parallel ranks of each server.
    """

    def __init__(
        self,
        servers: Sequence[ServerControl],
        ranks: TrainerRanks,
        plan: BroadcastPlan,
        engine_tp: int,
        config: SyncConfig,
        timeouts: TimeoutConfig,
        device: Device,
    ) -> None:
        self._servers = list(servers)
        self._ranks = ranks
        self._plan = plan
        self._engine_tp = engine_tp
        self._pause_mode = config.pause_mode
        self._seconds = timeouts.weight_sync
        self._backend = device.backend
        self._lock = asyncio.Lock()
        self._connections = 0
        self._name: str | None = None
        self._quarantined: dict[str, str] = {}

    @property
    def quarantined(self) -> dict[str, str]:
        """Servers left paused by a failed publish, with the reason."""
        return dict(self._quarantined)

    async def connect(self) -> None:
        """Joins ranks and servers into one group per pipeline stage; nothing is paused. `publish` does it when needed.

        Raises:
            PublishError: someone could not join within the deadline; nobody is left waiting.
        """
        async with self._lock:
            attempt = self._new_attempt(0)
            await self._guarded(attempt, [("connect", self._connect)])

    async def publish(self, version: int) -> SyncReport:
        """Moves the trainer's weights into every server as ``version``; returns once each of them reports it.

        Raises:
            PublishError: names the servers, the phase and the version, and says which servers stay paused. The
                version is not published; publishing again, the same or a later one, is allowed.
        """
        async with self._lock:
            attempt = self._new_attempt(version)
            phases = [
                ("connect", self._connect),
                ("pause", self._pause),
                ("flush", self._flush),
                ("begin", self._begin),
                ("transfer", self._transfer),
                ("end", self._end),
                ("verify", self._verify),
                ("continue", self._continue),
            ]
            await self._guarded(attempt, phases)
            self._quarantined.clear()
            log.info("published version %d: %s", version, attempt.seconds)
            return SyncReport(version, self._plan.nbytes, attempt.seconds)

    async def close(self) -> None:
        """Leaves the groups on both sides. Servers go on with what they serve."""
        async with self._lock:
            await self._disconnect()

    def _new_attempt(self, version: int) -> _Attempt:
        return _Attempt(version, {server.url: Standing() for server in self._servers})

    async def _guarded(
        self, attempt: _Attempt, phases: Sequence[tuple[str, Callable[[_Attempt], Awaitable[None]]]]
    ) -> None:
        """Runs the phases; on any failure, or when cancelled, releases the servers that may be released."""
        try:
            for phase, step in phases:
                with attempt.during(phase):
                    await step(attempt)
        except BaseException as error:
            if attempt.phase in ("connect", "transfer"):
                await self._disconnect()
            await self._release(attempt)
            if not isinstance(error, Exception):
                raise
            causes = error.causes if isinstance(error, _PhaseFailed) else {"trainer": error}
            raise self._explain(attempt, error, list(causes)) from next(iter(causes.values()))

    # Phases

    async def _connect(self, attempt: _Attempt) -> None:
        if self._name is not None:
            return
        self._connections += 1
        self._name = name = f"megasync-{self._connections}"
        addresses = await self._ranks.call("sync_listen", self._seconds, timeout=self._seconds + GRACE_SECONDS)
        stages = [addresses[sender] for sender in self._plan.senders]
        engine_ranks = len(self._servers) * self._engine_tp
        join = self._ranks.call(
            "sync_join", name, addresses, engine_ranks, self._seconds, timeout=self._seconds + GRACE_SECONDS
        )

        async def init(index: int, server: ServerControl) -> None:
            for stage, (host, port) in enumerate(stages):
                body = {
                    "master_address": host,
                    "master_port": port,
                    "rank_offset": 1 + index * self._engine_tp,
                    "world_size": 1 + engine_ranks,
                    "group_name": group_name(name, stage),
                    "backend": self._backend,
                }
                await server.post("/init_weights_update_group", body, timeout=self._seconds)

        inits = {server.url: init(index, server) for index, server in enumerate(self._servers)}
        await _together({"trainer": join, **inits}, self._seconds + GRACE_SECONDS)

    async def _pause(self, attempt: _Attempt) -> None:
        for standing in attempt.standing.values():
            standing.paused = True
        await self._each(lambda server: self._post(server, "/pause_generation", {"mode": self._pause_mode}))

    async def _flush(self, attempt: _Attempt) -> None:
        """Drops the old weights' prefix cache. `in_place` keeps running requests' cache, so it cannot be flushed."""
        if self._pause_mode != "in_place":
            await self._each(lambda server: self._post(server, f"/flush_cache?timeout={FLUSH_WAIT_SECONDS}"))

    async def _begin(self, attempt: _Attempt) -> None:
        for standing in attempt.standing.values():
            standing.begun = True
        await self._each(lambda server: self._post(server, "/begin_weight_update", {}))

    async def _transfer(self, attempt: _Attempt) -> None:
        """Ranks send while each server takes the buckets, in the same order everywhere."""
        limit = self._seconds + GRACE_SECONDS
        sending = asyncio.ensure_future(
            self._ranks.call("sync_send", attempt.version, self._seconds, timeout=limit + GRACE_SECONDS)
        )
        loading = {server.url: asyncio.ensure_future(self._load(server, attempt)) for server in self._servers}
        tasks = {"trainer": sending, **loading}
        try:
            await _together(tasks, limit)
        except BaseException:
            # Servers still in a collective are woken when the ranks leave it; give them the time to say so.
            await self._wake(tasks)
            raise
        for activity in ("pack", "wire"):
            attempt.seconds[activity] = max(result.get(activity, 0.0) for result in sending.result())

    async def _load(self, server: ServerControl, attempt: _Attempt) -> None:
        """Has one server receive and load every bucket; `Standing` always tells how far it came."""
        standing = attempt.standing[server.url]
        for index, bucket in enumerate(self._plan.buckets):
            last = index + 1 == len(self._plan.buckets)
            standing.in_flight = True
            try:
                await self._post(server, "/update_weights_from_distributed", self._bucket_body(bucket, attempt, last))
            except ServerError as error:
                standing.in_flight = NOT_RECEIVED not in str(error)
                raise
            standing.loaded += 1
            standing.in_flight = False

    def _bucket_body(self, bucket: Bucket, attempt: _Attempt, last: bool) -> dict[str, Any]:
        body = {
            "names": [entry.name for entry in bucket.tensors],
            "dtypes": [self._plan.dtype] * len(bucket.tensors),
            "shapes": [list(entry.shape) for entry in bucket.tensors],
            "group_name": group_name(self._name or "", bucket.stage),
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        return body | {"weight_version": str(attempt.version)} if last else body

    async def _end(self, attempt: _Attempt) -> None:
        await self._each(lambda server: self._post(server, "/end_weight_update", {}))

    async def _verify(self, attempt: _Attempt) -> None:
        async def check(server: ServerControl) -> None:
            found = (await server.get("/model_info", timeout=self._seconds)).get("weight_version")
            if found != str(attempt.version):
                raise SyncError(f"it reports version {found!r} instead of {attempt.version}")

        await self._each(check)

    async def _continue(self, attempt: _Attempt) -> None:
        await self._each(lambda server: self._post(server, "/continue_generation", {"torch_empty_cache": False}))

    # After a failure

    async def _wake(self, tasks: Mapping[str, asyncio.Future]) -> None:
        """Ends what is left of a failed transfer: ranks and servers leave the groups, then their calls return."""
        await self._disconnect(only={who for who, task in tasks.items() if task.done()})
        await asyncio.wait(tasks.values(), timeout=RECOVERY_SECONDS)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _disconnect(self, only: set[str] | None = None) -> None:
        pass
