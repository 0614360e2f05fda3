"""A simulated weight sync: stage, then commit server by server. Faults may strike between any two of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from megasync.errors import RankLost
from megasync.lab.sim.invariants import Weights
from megasync.lab.sim.network import Network
from megasync.lab.sim.ranks import SimRanks
from megasync.lab.sim.servers import SimServer
from megasync.serving.control import ServerControl
from megasync.sync.attempt import PublishError

STAGE_SECONDS, COMMIT_SECONDS = 0.06, 0.01


class SimPublisher:
    """A `WeightPublisher`. A hung server is detected after `deadline` seconds (`timeouts.weight_sync`)."""

    def __init__(self, ranks: SimRanks, network: Network, deadline: float) -> None:
        self._ranks = ranks
        self._network = network
        self._chance, self._invariants = network.chance, network.invariants
        self._deadline = deadline
        self._urls: set[str] = set()
        self._linked_to = ranks.starts, ranks.data_parallel

    def add(self, control: ServerControl) -> None:
        self._urls.add(control.url)

    def remove(self, url: str) -> None:
        self._urls.discard(url)

    def forget_ranks(self, data_parallel: int) -> None:
        self._linked_to = self._ranks.starts, data_parallel

    async def publish(self, version: int, only: Collection[str] | None = None) -> dict[str, float]:
        ranks = self._ranks.starts, self._ranks.data_parallel
        self._invariants.need(self._linked_to == ranks, "the transport knows the ranks that it asks")
        weights = self._ranks.weights
        self._invariants.publish_begins(version, weights)
        targets = {url: self._network.servers[url] for url in sorted(self._urls) if only is None or url in only}
        self._invariants.note(f"publish {version} to {', '.join(targets)}")
        failed = {url: "it is no longer among the servers" for url in sorted(only or ()) if url not in targets}
        moved: list[str] = []
        phase, cause = "stage", None
        try:
            failed |= await self._stage(version, targets)
            if not failed:
                phase = "commit"
                await self._commit(version, weights, targets, failed, moved)
        except RankLost as loss:
            # A server that waits for the dead rank may be reported as failed, or may not; the schedule decides.
            blamed = [url for url in targets if self._chance.share(f"blame {url} {version}") >= 0.5]
            failed |= dict.fromkeys(blamed, "it waited for the trainer")
            cause = loss
        broken = not failed and cause is None and self._chance.happens("link breaks in a sync", f"version {version}")
        if failed or cause or broken:
            self._invariants.note(f"publish {version} failed in {phase}: {failed or cause or 'link'}; moved: {moved}")
            problem = f"version {version}: {failed or cause or 'the link broke'}"
            raise PublishError(problem, version, phase, {}, failed, moved) from cause
        self._invariants.publish_ends(version)
        return {"sync/version": float(version)}

    async def _stage(self, version: int, targets: dict[str, SimServer]) -> dict[str, str]:
        """Stage the weights on every server while it serves its old ones. Returns the cause of each failure by URL."""
        failed = {}
        if self._chance.happens("rank dies in a sync", f"version {version}"):
            self._ranks.kill()
        await self._ranks.work(f"sync {version}", self._chance.seconds("sync", STAGE_SECONDS, f"version {version}"))
        for url, server in targets.items():
            if self._chance.happens("server hangs in a sync", url):
                await asyncio.sleep(self._deadline)
                failed[url] = "it did not answer in time"
            elif self._chance.happens("server dies in a sync", url):
                server.kill()
            if server.gone.is_set():
                failed[url] = "it died"
        return failed

    async def _commit(
        self, version: int, weights: Weights, targets: dict[str, SimServer], failed: dict[str, str], moved: list[str]
    ) -> None:
        """Commit on one server after the other: pause it, mix its weights, complete them, resume it.

        A server that dies in its commit does not affect the others.
        """
        for url, server in targets.items():
            server.pause()
            server.weights = None
            await asyncio.sleep(self._chance.seconds("sync", COMMIT_SECONDS, url))
            if self._chance.happens("server dies in its commit", url):
                server.kill()
            if server.gone.is_set():
                failed[url] = "it died in its commit"
                continue
            server.version, server.weights = version, weights
            self._invariants.synced(url)
            server.resume()
            self._invariants.names(version, server.weights)
            moved.append(url)
        await self._ranks.work(f"sync {version}", 0.0)
