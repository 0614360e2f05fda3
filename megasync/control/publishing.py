"""Brings the trainer's weights to the servers: a new version to all of them, the published one to those that join.

A server that fails a sync leaves the router, and the version is published to the rest. A server that alone fails parity
is restarted; the run ends when all servers disagree with the trainer. The fleet restarts servers and bounds how often.
A joiner gets the published version while the trainer waits, or the next one. Pinned servers (`pinning`) are left out:
they are not among those that serve, and no publish is sent to all servers of the transport while there are any.

Invariant: the trainer's weights differ from the published ones only while ``progress.unpublished`` is not zero, so a
joiner gets exactly the weights that its version number names. `Progress.rewind` and `FleetSync.publish` guarantee it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from megasync.concurrency.tasks import cancel_and_wait
from megasync.errors import ServerParityError
from megasync.observe import trace
from megasync.sync.attempt import PublishError

if TYPE_CHECKING:
    from megasync.config import Config
    from megasync.control.colocation import Colocation
    from megasync.control.interfaces import ControlledParts
    from megasync.control.progress import Progress
    from megasync.control.watchdog import Watchdog

# Publishes in a row that may fail on the trainer's side although all ranks are alive, such as by a broken link.
LINK_FAILURES = 3
# A turn is a generation and up to two calls to the servers' parsers, each of them within `timeouts.request`.
TURN_PARTS = 3


class FleetSync:
    """Publishes new versions and syncs joiners; every failed attempt is retried with the servers that are left."""

    def __init__(
        self, config: Config, parts: ControlledParts, progress: Progress, watchdog: Watchdog, colocation: Colocation
    ) -> None:
        self._partial_rollout = config.schedule.partial_rollout
        self._gate_timeout = TURN_PARTS * config.timeouts.request
        self._trainer = parts.trainer
        self._publisher = parts.publisher
        self._buffer = parts.buffer
        self._rollouter = parts.rollouter
        self._workers = parts.rollout_workers
        self._fleet = parts.fleet
        self._reservations = parts.reservations
        self._observer = parts.observer
        self._progress = progress
        self._watchdog = watchdog
        self._colocation = colocation
        self._link_failures = 0
        self._faults: Counter[str] = Counter()

    def metrics(self) -> dict[str, float]:
        """Counts since this process started, by kind of fault."""
        kinds = ("failed_publishes", "servers_joined", "parity_restarts")
        return {f"faults/{kind}": float(self._faults[kind]) for kind in kinds}

    async def publish(self) -> dict[str, float]:
        """Publishes the trainer's weights to all servers as the next version and frees the slots of trained groups.

        Returns metrics. Raises RankLost when a dead rank made the publish fail.
        """
        await self._colocation.to_servers()
        self._observer.activity("trainer", "syncing weights")
        version = self._progress.next_version()
        # Before any server can hold it: a worker refuses answers of versions that it does not know.
        await self._announce()
        with trace.span("trainer", "publish", step=self._progress.step, version=version):
            async with self._requests_paused():
                metrics = await self._publish_to_all(version)
        self._progress.published(version)
        self._observer.published(self._progress.step, version, metrics)
        await self._announce()
        await self._buffer.publish(version)
        return metrics

    async def _announce(self) -> None:
        await self._workers.announce(self._progress.version, self._progress.claimed)

    async def sync_joiners(self) -> None:
        """Brings joiners the published version, so that they serve. The fleet gives up on one that fails too often."""
        await self._colocation.to_servers()
        while joiners := {server.url for server in self._fleet.joiners()}:
            if self._progress.unpublished:
                # The trainer no longer holds the published weights; its current ones get a version of their own.
                await self.publish()
                continue
            self._observer.activity("trainer", f"syncing weights to {len(joiners)} joining servers")
            try:
                with trace.span("trainer", "publish to joiners", version=self._progress.version, servers=len(joiners)):
                    _, disagreeing = await self._publish_to(self._progress.version, joiners, joiners)
            except PublishError as error:
                await self._handle_failure(error)
            else:
                await self._let_serve(joiners - disagreeing, self._progress.version)

    async def sync_joiners_during(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that needs servers but not the trainer, and syncs joiners meanwhile: the work may wait for them."""
        working = asyncio.create_task(work, name="work while joiners are synced")
        try:
            while not working.done():
                await self.sync_joiners()
                await self.wait_for_fleet_or(working)
            working.result()
        finally:
            await cancel_and_wait(working)

    async def wait_for_fleet_or(self, *tasks: asyncio.Task[Any]) -> None:
        """Returns when one of the tasks is done, or when the fleet has changed since this was last asked."""
        changed = asyncio.create_task(self._fleet.changed(), name="changed")
        try:
            await asyncio.wait({*tasks, changed}, return_when=asyncio.FIRST_COMPLETED)
            if changed.done():
                changed.result()
        finally:
            await cancel_and_wait(changed)

    @asynccontextmanager
    async def _requests_paused(self) -> AsyncGenerator[None]:
        """Without partial rollout, no request may be in flight during a sync."""
        if self._partial_rollout:
            yield
            return
        gate = asyncio.create_task(self._rollouter.gate(self._gate_timeout), name="gate")
        try:
            # With no server left, requests cannot finish and see no second version: they wait for this very sync.
            with self._watchdog.bounded():
                while not gate.done() and self._fleet.serving():
                    await self.wait_for_fleet_or(gate)
            if gate.done():
                gate.result()
            yield
        finally:
            await cancel_and_wait(gate)
            self._rollouter.open()

    async def _publish_to_all(self, version: int) -> dict[str, float]:
        """Retries until every server that is left holds the version. Servers that failed it are tried last."""
        failed: set[str] = set()
        while True:
            joiners = {server.url for server in self._fleet.joiners()}
            targets = joiners | {server.url for server in self._fleet.serving()}
            if not targets:
                # The fleet restarts a server, or its watch ends the run.
                await self._fleet.changed()
                continue
            if targets <= failed:
                # Every server left has failed before and is alive; the fleet ends those that fail too often.
                failed.clear()
            only = targets - failed if failed or self._reservations.pinned() else None
            try:
                metrics, disagreeing = await self._publish_to(version, targets, only)
            except PublishError as error:
                failed |= await self._handle_failure(error)
            else:
                await self._let_serve(joiners - failed - disagreeing, version)
                if targets <= failed | disagreeing:
                    # No server serves the version: the restarted ones get it.
                    continue
                return metrics

    async def _publish_to(
        self, version: int, targets: set[str], only: set[str] | None
    ) -> tuple[dict[str, float], set[str]]:
        """Publishes once. Returns the metrics, and the servers that fail parity, which the fleet restarts.

        Raises as the publisher does; ParityError when all servers fail parity.
        """
        with self._watchdog.bounded(), self._fleet.syncing(targets if only is None else only):
            try:
                return await self._publisher.publish(version, only), set()
            except ServerParityError as error:
                disagreement = error
        self._faults["parity_restarts"] += len(disagreement.reasons)
        self._observer.message(f"restarting servers that alone disagree with the trainer: {disagreement}")
        await self._fleet.parity_failed(disagreement.reasons)
        return disagreement.metrics, set(disagreement.reasons)

    async def _handle_failure(self, error: PublishError) -> set[str]:
        """Reports the servers that failed a publish to the fleet and returns them. Raises RankLost for a dead rank."""
        self._faults["failed_publishes"] += 1
        # Ranks first: servers that wait for a dead rank look as if they had failed themselves.
        with self._watchdog.bounded():
            await self._trainer.check()
        if not error.failed:
            self._link_failures += 1
            self._observer.fault("sync", str(error))
            if self._link_failures >= LINK_FAILURES:
                raise error
            self._observer.message(f"retrying the publish: {error}")
            return set()
        reasons = {url: error.quarantined.get(url, str(error)) for url in error.failed}
        self._observer.message(f"taking {', '.join(reasons)} out of service until a weight sync succeeds: {error}")
        await self._fleet.sync_failed(reasons)
        return set(reasons)

    async def _let_serve(self, joiners: set[str], version: int) -> None:
        if self._link_failures:
            self._observer.recovery("sync", f"version {version} is published")
        self._link_failures = 0
        if joiners:
            await self._fleet.joined(joiners)
            self._faults["servers_joined"] += len(joiners)
            self._observer.message(f"{', '.join(sorted(joiners))} joined at version {version}")
