"""Publishing a version: the driver's side of a weight sync, over stock SGLang endpoints.

    connect → pause → flush → begin → transfer → end → verify → continue
    (once)            (not in_place)  per bucket       /model_info

A server generates only while it holds exactly one version: it continues after all servers have reported the new one, or,
after a failure, when nothing of the new one was loaded into it (`Standing.mixed`, asked in `_release`). A server that
took part of a failed version stays paused; the next publish that succeeds sets it free.

Each phase has a deadline of ``timeouts.weight_sync`` seconds, and each step of the clean-up after a failure one of its
own. Whatever failed, no rank and no server that still runs is left inside a collective: the groups are closed, and made
anew by the next publish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megasync.errors import ServerError, SyncError
from megasync.sync.attempt import NOT_RECEIVED, Attempt, Standing, SyncReport, chosen, each
from megasync.sync.broadcast.plan import BroadcastPlan, group_name
from megasync.sync.served import RECOVERY_SECONDS, begin_update, flush_cache

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.device import Device
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# The ranks keep their own deadline; the driver waits a little longer, so that it hears their reason.
GRACE_SECONDS = 5.0


class TrainerRanks(Protocol):
    """All trainer ranks; a method ``sync_x`` is `BroadcastSender.x` on each of them."""

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Results in rank order; raises when a rank failed or the time (seconds) is up."""


class BroadcastSync:
    """Publishes versions to a changing set of servers; one publish at a time.

    A group holds exactly the servers of one publish, so it is made anew when the next one is for others.

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
        self._servers = {server.url: server for server in servers}
        # Those in the groups; also those of the publish under way.
        self._members: list[ServerControl] = []
        self._groups_are_whole = True
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
        """Servers that a failed publish left paused, with the reason."""
        return dict(self._quarantined)

    def add(self, server: ServerControl) -> None:
        """From the next publish on this server is updated too."""
        self._servers[server.url] = server
        self._quarantined.pop(server.url, None)
        self._groups_are_whole = False

    def remove(self, url: str) -> None:
        """The server is no longer updated."""
        if self._servers.pop(url, None) is not None:
            self._groups_are_whole = False
        self._quarantined.pop(url, None)

    def forget_ranks(self) -> None:
        """The trainer ranks are new processes: the servers' groups are with ranks that are gone."""
        self._groups_are_whole = False

    async def connect(self) -> None:
        """Joins ranks and servers into one group per pipeline stage; nothing is paused. `publish` does it when needed.

        Raises:
            PublishError: someone could not join within the deadline; nobody is left waiting.
        """
        async with self._lock:
            await self._run(0, [("connect", self._connect)], None)

    async def publish(self, version: int, only: Collection[str] | None = None) -> SyncReport:
        """Moves the trainer's weights into every server as ``version``; returns once each of them reports it.

        Args:
            only: URLs of the servers to bring to the version, when the others have it already.

        Raises:
            PublishError: names the servers, the phase and the version, and says which servers stay paused. The
                version is not published; publishing again, the same or a later one, is allowed.
        """
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
        async with self._lock:
            attempt = await self._run(version, phases, only)
            for url in attempt.standing:
                self._quarantined.pop(url, None)
        log.info("published version %d: %s", version, attempt.seconds)
        received = self._plan.nbytes * len(attempt.standing) * self._engine_tp
        return SyncReport(version, tuple(attempt.standing), received, attempt.seconds)

    async def close(self) -> None:
        """Leaves the groups on both sides. Servers go on with what they serve."""
        async with self._lock:
            await self._disconnect(Attempt(0, {}))

    async def _run(
        self,
        version: int,
        phases: Sequence[tuple[str, Callable[[Attempt], Awaitable[None]]]],
        only: Collection[str] | None,
    ) -> Attempt:
        """Runs the phases; on any failure, or when cancelled, closes broken groups and releases what may be released."""
        attempt = Attempt(version, {})
        try:
            wanted = chosen(self._servers, only)
            attempt.standing |= {server.url: Standing() for server in wanted}
            if wanted != self._members or not self._groups_are_whole:
                await self._disconnect(attempt)
            self._members = wanted
            for phase, step in phases:
                with attempt.during(phase):
                    await step(attempt)
        except BaseException as error:
            attempt.failed = True
            if attempt.phase in ("connect", "transfer"):
                await self._disconnect(attempt)
            await self._release(attempt)
            if not isinstance(error, Exception):
                raise
            raise attempt.error(error, self._quarantined) from error
        return attempt

    # Phases

    async def _connect(self, attempt: Attempt) -> None:
        if self._name is not None:
            return
        self._groups_are_whole = True
        self._connections += 1
        self._name = name = f"megasync-{self._connections}"
        limit = self._seconds + GRACE_SECONDS
        addresses = await self._ranks.call("sync_listen", self._seconds, timeout=limit)
        meeting_points = [addresses[sender] for sender in self._plan.senders]
        engine_ranks = len(self._members) * self._engine_tp

        async def init(index: int, server: ServerControl) -> None:
            for stage, (host, port) in enumerate(meeting_points):
                body = {
                    "master_address": host,
                    "master_port": port,
                    "rank_offset": 1 + index * self._engine_tp,
                    "world_size": 1 + engine_ranks,
                    "group_name": group_name(name, stage),
                    "backend": self._backend,
                }
                await self._post(server, "/init_weights_update_group", body)

        join = self._ranks.call("sync_join", name, addresses, engine_ranks, self._seconds, timeout=limit)
        attempt.tasks = {"trainer": asyncio.ensure_future(join)}
        for index, server in enumerate(self._members):
            attempt.tasks[server.url] = asyncio.ensure_future(init(index, server))
        await attempt.together(limit + GRACE_SECONDS)

    async def _pause(self, attempt: Attempt) -> None:
        for standing in attempt.standing.values():
            standing.paused = True
        await self._each(lambda server: self._post(server, "/pause_generation", {"mode": self._pause_mode}))

    async def _flush(self, attempt: Attempt) -> None:
        """Drops the old weights' prefix cache. `in_place` keeps running requests' cache, so it cannot be flushed."""
        if self._pause_mode != "in_place":
            await self._each(lambda server: flush_cache(server, self._seconds))

    async def _begin(self, attempt: Attempt) -> None:
        for standing in attempt.standing.values():
            standing.begun = True
        await self._each(lambda server: begin_update(server, self._seconds))

    async def _transfer(self, attempt: Attempt) -> None:
        """Ranks send while each server takes the buckets, in the same order everywhere."""
        limit = self._seconds + GRACE_SECONDS
        sending = asyncio.ensure_future(self._ranks.call("sync_send", attempt.version, self._seconds, timeout=limit))
        attempt.tasks = {"trainer": sending}
        for server in self._members:
            attempt.tasks[server.url] = asyncio.ensure_future(self._load(server, attempt))
        await attempt.together(limit + GRACE_SECONDS)
        for activity in ("pack", "wire"):
            attempt.seconds[activity] = max(result[activity] for result in sending.result())

    async def _load(self, server: ServerControl, attempt: Attempt) -> None:
        """Has one server receive and load every bucket; its standing always tells how far it came."""
        standing = attempt.standing[server.url]
        name = self._name
        for index, bucket in enumerate(self._plan.buckets):
            if attempt.failed:
                raise SyncError("stopped, because the publish failed elsewhere")
            body = {
                "names": [entry.name for entry in bucket.tensors],
                "dtypes": [bucket.dtype] * len(bucket.tensors),
                "shapes": [list(entry.shape) for entry in bucket.tensors],
                "group_name": group_name(name, bucket.stage),
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            if index + 1 == len(self._plan.buckets):
                body["weight_version"] = str(attempt.version)
            standing.in_doubt = True
            try:
                await self._post(server, "/update_weights_from_distributed", body)
            except ServerError as error:
                standing.in_doubt = NOT_RECEIVED not in str(error)
                standing.stuck = isinstance(error.__cause__, TimeoutError)
                raise
            standing.loaded += 1
            standing.in_doubt = False

    async def _end(self, attempt: Attempt) -> None:
        await self._each(lambda server: self._post(server, "/end_weight_update"))

    async def _verify(self, attempt: Attempt) -> None:
        async def check(server: ServerControl) -> None:
            found = await server.weight_version(self._seconds)
            if found != attempt.version:
                raise SyncError(f"it reports version {found} instead of {attempt.version}")

        await self._each(check)

    async def _continue(self, attempt: Attempt) -> None:
        async def go_on(server: ServerControl) -> None:
            await self._post(server, "/continue_generation", {"torch_empty_cache": False})
            standing = attempt.standing[server.url]
            standing.paused, standing.moved = False, True

        await self._each(go_on)

    async def _each(self, call: Callable[[ServerControl], Awaitable[Any]]) -> None:
        await each(self._members, call)

    async def _post(
        self, server: ServerControl, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        return await server.post(path, body or {}, timeout=timeout or self._seconds)

    # Clean-up

    async def _disconnect(self, attempt: Attempt) -> None:
        """Closes the groups on both sides and ends the attempt's calls, which may be waiting inside them.

        A server leaves as soon as its call is done, which wakes a sender that waits for it; when the ranks leave, the
        servers that wait for a sender are woken. Nothing here raises: what cannot be reached is logged.
        """
        if self._name is None:
            return
        name, self._name = self._name, None
        tasks = attempt.tasks
        ranks = asyncio.ensure_future(self._ranks_leave(tasks.get("trainer")))
        await asyncio.gather(ranks, *(self._server_leaves(server, name, attempt, ranks) for server in self._members))
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _ranks_leave(self, task: asyncio.Future | None) -> None:
        if task is not None:
            await asyncio.wait([task], timeout=RECOVERY_SECONDS)
        leave = self._ranks.call("sync_leave", timeout=RECOVERY_SECONDS)
        for failure in await asyncio.gather(leave, return_exceptions=True):
            if isinstance(failure, BaseException):
                log.warning("not every trainer rank left the sync groups: %s", failure)

    async def _server_leaves(self, server: ServerControl, name: str, attempt: Attempt, ranks: asyncio.Future) -> None:
        """Waits until the server's call is done, at most until some time after the ranks have left."""
        if task := attempt.tasks.get(server.url):
            await asyncio.wait([task, ranks], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([task], timeout=RECOVERY_SECONDS)
            standing = attempt.standing[server.url]
            standing.stuck |= not task.done()
            if standing.stuck:
                log.warning("%s is still inside sync group %s", server.url, name)
                return
        for stage in range(len(self._plan.senders)):
            body = {"group_name": group_name(name, stage)}
            try:
                await self._post(server, "/destroy_weights_update_group", body, RECOVERY_SECONDS)
            except ServerError as error:
                log.debug("a sync group was not there to close: %s", error)

    async def _release(self, attempt: Attempt) -> None:
        """Lets those servers generate again that hold one version as a whole; the others stay paused, by name."""
        ours = [server for server in self._members if server.url in attempt.standing]
        await asyncio.gather(*(self._release_one(server, attempt) for server in ours))

    async def _release_one(self, server: ServerControl, attempt: Attempt) -> None:
        standing = attempt.standing[server.url]
        if not standing.paused:
            return
        if standing.begun and not standing.stuck:
            try:
                await self._post(server, "/end_weight_update", timeout=RECOVERY_SECONDS)
            except ServerError as error:
                log.debug("no weight update to end: %s", error)
        if standing.mixed:
            self._quarantined[server.url] = standing.describe(attempt.version, len(self._plan.buckets))
        if server.url in self._quarantined:
            return
        try:
            await self._post(server, "/continue_generation", {"torch_empty_cache": False}, RECOVERY_SECONDS)
        except ServerError as error:
            self._quarantined[server.url] = f"it could not be told to go on: {error}"
