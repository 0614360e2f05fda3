"""Broadcast publishing: the driver's side of a weight sync over stock SGLang endpoints.

    connect → pause → flush → begin → transfer → end → verify → continue
    (once)            (not in_place)  per bucket       /model_info

A server resumes only after all servers have reported the new version, or, after a failure, when nothing of the new
version was loaded into it (`ServerProgress.mixed`). A server that took part of a failed version stays paused until a
publish succeeds.

Whatever fails, no rank and no running server is left inside a collective: the groups are closed, and the next publish
makes new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from megasync.errors import ServerError, SyncError
from megasync.sync.attempt import NOT_RECEIVED, RECOVERY_SECONDS, Attempt, ServerProgress, ServerUpdate, call_each
from megasync.sync.broadcast.plan import BroadcastPlan, group_name
from megasync.sync.weight_sync import GRACE_SECONDS, SendingRank, TrainerRanks, WeightSync

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.device import Device
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)


class BroadcastSync(WeightSync[ServerUpdate]):
    """Publishes versions as whole tensors, broadcast to all servers at once.

    A group holds exactly the servers of one publish, with ``engine_tp`` ranks each. A publish to other servers makes
    new groups. A method ``sync_x`` of the ranks is `BroadcastSender.x` on each of them, and their senders hold the same
    plan.
    """

    _update_type = ServerUpdate

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
        super().__init__(servers, ranks, config, timeouts)
        self._plan = plan
        self._engine_tp = engine_tp
        self._backend = device.backend
        # The servers in the groups, which are also those of the publish in progress.
        self._members: list[ServerUpdate] = []
        self._groups_are_stale = False
        self._connections = 0
        # Prefix of the groups' names; None while there are none.
        self._name: str | None = None

    def forget_ranks(self, data_parallel: int) -> None:
        self._plan = self._plan.with_data_parallel(data_parallel)
        self._groups_are_stale = True

    async def close(self) -> None:
        async with self._lock:
            await self._disconnect(Attempt(0, {}))

    def _new_attempt(self, version: int) -> Attempt:
        """With no progress yet: `_connect` adds the servers of the attempt."""
        return Attempt(version, {})

    async def _move(self, servers: list[ServerUpdate], attempt: Attempt, *, everywhere: bool) -> int:
        async def each(phase: str, call: Callable[[ServerUpdate], Awaitable[None]]) -> None:
            with attempt.during(phase):
                await call_each(servers, call)

        await self._connect(servers, attempt)
        await each("pause", lambda server: server.pause(attempt))
        await each("flush", ServerUpdate.flush)
        await each("begin", lambda server: server.begin(attempt))
        with attempt.during("transfer"):
            await self._transfer(attempt)
        await each("end", lambda server: server.end(attempt))
        await each("verify", lambda server: server.verify(attempt))
        await each("continue", lambda server: self._resume(server, attempt))
        return self._plan.nbytes * len(servers) * self._engine_tp

    # Phases

    async def _connect(self, servers: list[ServerUpdate], attempt: Attempt) -> None:
        """Joins ranks and servers into one group per pipeline stage."""
        attempt.progress = {server.url: ServerProgress(len(self._plan.buckets)) for server in servers}
        if servers != self._members or self._groups_are_stale:
            await self._disconnect(attempt)
        self._members = servers
        with attempt.during("connect"):
            if self._name is None:
                await self._make_groups(attempt)

    async def _make_groups(self, attempt: Attempt) -> None:
        self._groups_are_stale = False
        self._connections += 1
        self._name = name = f"megasync-{self._connections}"
        addresses = await self._ranks.on_all(self._limit, SendingRank.sync_listen, self._seconds)
        meeting_points = [point for sender in self._plan.senders if (point := addresses[sender]) is not None]
        engine_ranks = len(self._members) * self._engine_tp

        async def init(index: int, server: ServerUpdate) -> None:
            for stage, (host, port) in enumerate(meeting_points):
                body = {
                    "master_address": host,
                    "master_port": port,
                    "rank_offset": 1 + index * self._engine_tp,
                    "world_size": 1 + engine_ranks,
                    "group_name": group_name(name, stage),
                    "backend": self._backend,
                }
                await server.post("/init_weights_update_group", body)

        join = self._ranks.on_all(self._limit, SendingRank.sync_join, name, addresses, engine_ranks, self._seconds)
        attempt.tasks = {"trainer": asyncio.ensure_future(join)}
        for index, server in enumerate(self._members):
            attempt.tasks[server.url] = asyncio.ensure_future(init(index, server))
        await attempt.wait_for_tasks(self._limit + GRACE_SECONDS)

    async def _transfer(self, attempt: Attempt) -> None:
        """Ranks send while each server takes the buckets, in the same order everywhere."""
        assert self._name is not None
        call = self._ranks.on_all(self._limit, SendingRank.sync_send, attempt.version, self._seconds)
        sending = asyncio.ensure_future(call)
        attempt.tasks = {"trainer": sending}
        for server in self._members:
            attempt.tasks[server.url] = asyncio.ensure_future(self._load(server, self._name, attempt))
        await attempt.wait_for_tasks(self._limit + GRACE_SECONDS)
        for activity in ("pack", "wire"):
            attempt.note(activity, max(seconds[activity] for seconds in sending.result()))

    async def _load(self, server: ServerUpdate, name: str, attempt: Attempt) -> None:
        """Has one server receive and load every bucket; its progress always says how far it got."""
        progress = attempt.progress[server.url]
        for index, bucket in enumerate(self._plan.buckets):
            if attempt.failed:
                raise SyncError("stopped, because the publish failed elsewhere")
            body: dict[str, Any] = {
                "names": [entry.name for entry in bucket.tensors],
                "dtypes": [bucket.dtype] * len(bucket.tensors),
                "shapes": [list(entry.shape) for entry in bucket.tensors],
                "group_name": group_name(name, bucket.stage),
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            if index + 1 == len(self._plan.buckets):
                body["weight_version"] = str(attempt.version)
            progress.in_doubt = True
            try:
                await server.post("/update_weights_from_distributed", body)
            except ServerError as error:
                progress.in_doubt = NOT_RECEIVED not in str(error)
                progress.stuck = isinstance(error.__cause__, TimeoutError)
                raise
            progress.loaded += 1
            progress.in_doubt = False

    # Clean-up

    async def _clean_up(self, attempt: Attempt) -> None:
        attempt.failed = True
        if attempt.phase in ("connect", "transfer"):
            await self._disconnect(attempt)

    def _involved(self, attempt: Attempt) -> list[ServerUpdate]:
        return [server for server in self._members if server.url in attempt.progress]

    async def _disconnect(self, attempt: Attempt) -> None:
        """Closes the groups on both sides and ends the attempt's calls, which may be waiting inside them.

        A server leaves as soon as its call is done, which wakes a sender that waits for it. When the ranks leave, the
        servers that wait for a sender wake up. Raises nothing; what cannot be reached is logged.
        """
        if self._name is None:
            return
        name, self._name = self._name, None
        tasks = attempt.tasks
        ranks = asyncio.ensure_future(self._disconnect_ranks(tasks.get("trainer")))
        servers = (self._disconnect_server(server, name, attempt, ranks) for server in self._members)
        await asyncio.gather(ranks, *servers)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _disconnect_ranks(self, task: asyncio.Future[Any] | None) -> None:
        if task is not None:
            await asyncio.wait([task], timeout=RECOVERY_SECONDS)
        await self._leave_ranks(SendingRank.sync_leave)

    async def _disconnect_server(
        self, server: ServerUpdate, name: str, attempt: Attempt, ranks: asyncio.Future[None]
    ) -> None:
        """Waits until the server's call is done, at most until some time after the ranks have left."""
        if task := attempt.tasks.get(server.url):
            await asyncio.wait([task, ranks], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([task], timeout=RECOVERY_SECONDS)
            progress = attempt.progress[server.url]
            progress.stuck |= not task.done()
            if progress.stuck:
                log.warning("%s is still inside sync group %s", server.url, name)
                return
        for stage in range(len(self._plan.senders)):
            body = {"group_name": group_name(name, stage)}
            try:
                await server.post("/destroy_weights_update_group", body, RECOVERY_SECONDS)
            except ServerError as error:
                log.debug("%s has no sync group to close: %s", server.url, error)
