"""Pins a version for an evaluation (`eval.exact`), so that all of its answers come from one version of the weights.

    while             how                                                             what training does
    ----------------  --------------------------------------------------------------  ---------------------------------
    training waits    every server holds the version, since nothing is published       waits for the evaluation
    training goes on  `eval.servers` servers leave the router and the weight syncs     publishes to the others
    training goes on  servers keep the version's adapter under a name of its own       publishes to all
                      (`sync.transport=adapters`)

Invariant: a server is pinned only while the newest version that any server may hold is the published one, and nothing
is awaited between that check and the choice of the server. A publish claims its version before it chooses its servers,
so it never reaches a pinned one. Each answer's versions are checked before it is counted (`evaluation.periodic`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasync.errors import EvaluationAbandoned, SyncError, raised_as
from megasync.rollout.client import Destination, PinnedVersion

if TYPE_CHECKING:
    from megasync.cluster.reservations import Reservations
    from megasync.config import Config
    from megasync.control.interfaces import ControlledParts
    from megasync.control.progress import Progress

# Seconds between two attempts to pin, while a publish is in progress or too few servers serve.
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class EveryServer:
    """A version that every server has: it is the newest, or has an adapter."""

    version: int
    adapter: str | None = None

    async def destination(self, number: int) -> Destination:
        return Destination(adapter=self.adapter)

    async def lost(self, destination: Destination) -> None:
        await asyncio.Event().wait()


class PinnedServers:
    """A version on servers that answer nothing else. A lost one is replaced while the version is still the newest."""

    def __init__(self, servers: Reservations, progress: Progress, version: int, urls: list[str]) -> None:
        self.version = version
        self.urls = urls
        self._servers = servers
        self._progress = progress
        self._replacing = asyncio.Lock()

    async def destination(self, number: int) -> Destination:
        """Spreads the prompts over the servers; all responses to one prompt go to the same."""
        async with self._replacing:
            pinned = {server.url for server in self._servers.pinned()}
            self.urls = [url for url in self.urls if url in pinned]
            if not self.urls and is_settled(self._progress, self.version):
                self.urls = [*await self._servers.pin(1, self.version)]
        if not self.urls:
            raise EvaluationAbandoned(f"the server kept at version {self.version} is lost, and no other can be spared")
        return Destination(server=self.urls[number % len(self.urls)])

    async def lost(self, destination: Destination) -> None:
        await self._servers.unpinned(destination.server or "")


class Pinning:
    """Pins the published version, one evaluation at a time."""

    def __init__(self, config: Config, parts: ControlledParts, progress: Progress) -> None:
        self._count = config.eval.servers
        self._fleet = parts.fleet
        self._servers = parts.reservations
        self._adapters = parts.held_adapters
        self._progress = progress

    @property
    def needs_a_wait(self) -> bool:
        """Whether training has to wait for an evaluation now, because no server can be spared."""
        if self._adapters is not None:
            # No sync has brought version 0, so it has no adapter of its own.
            return self._progress.version == 0
        return self._fleet.size < 2

    def published(self) -> tuple[int, PinnedVersion]:
        """The step and the published version, which every server holds while training waits."""
        return self._progress.step, EveryServer(self._progress.version)

    @asynccontextmanager
    async def beside_training(self, over: Callable[[], bool]) -> AsyncGenerator[tuple[int, PinnedVersion] | None]:
        """The step and its published version, pinned within the context.

        Waits until a server can be spared. None once `over` returns true. Raises EvaluationAbandoned when only one
        server is left, or a server cannot load the version's adapter.
        """
        while not over() and not self.needs_a_wait:
            step, version = self._progress.step, self._progress.version
            if self._adapters is not None:
                with raised_as(EvaluationAbandoned, f"version {version} cannot be kept", of=SyncError):
                    name = await self._adapters.hold(version)
                if name is not None:
                    try:
                        yield step, EveryServer(version, name)
                    finally:
                        self._adapters.let_go(name)
                    return
            elif is_settled(self._progress, version) and (urls := await self._servers.pin(self._count, version)):
                servers = PinnedServers(self._servers, self._progress, version, [*urls])
                try:
                    yield step, servers
                finally:
                    self._servers.unpin(servers.urls)
                return
            await asyncio.sleep(RETRY_SECONDS)
        if not over():
            raise EvaluationAbandoned("one server is left, which cannot be spared; training waits for the next one")
        yield None


def is_settled(progress: Progress, version: int) -> bool:
    """Whether this is the published version and no server can hold a newer one."""
    return progress.version == progress.claimed == version
