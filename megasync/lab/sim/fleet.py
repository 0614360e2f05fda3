"""The real fleet over simulated processes, with its health state machines, restarts and router slot."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from megasync.cluster.fleet import Fleet
from megasync.cluster.server_slot import ServerProcess
from megasync.config.access import Keys
from megasync.lab.sim.language import VOCABULARY
from megasync.lab.sim.network import Network, SimSession
from megasync.lab.sim.servers import SimRouter, SimServer
from megasync.lab.sim.world import World
from megasync.rollout.suspects import CROWD_DEATHS
from megasync.serving.control import ServerControl


class SimFleet(Fleet):
    """The fleet of one driver, whose number keeps URLs unique. Prompts with the token `poison` kill servers."""

    def __init__(self, world: World, driver: int, network: Network, poison: int | None) -> None:
        # No process of this fleet is real, so it needs neither a device nor pools.
        device: Any = None
        pools: Any = _NoPools()
        keys = Keys(admin="key", router="key")
        super().__init__(world.config, world.run_dir, device, pools, keys, VOCABULARY, world.loop.time)
        self.router = network.router = SimRouter(network.chance)
        self._network = network
        self._poison = poison
        self._driver = driver
        # Deaths caused by a prompt that were attributed to requests, and deaths whose restarts were refunded.
        self._attributed = self._refunded = 0
        self.on_departure(self._departed)
        self._invariants = network.invariants
        self._invariants.pinned = lambda: {server.url for server in self.pinned()}

    def up(self) -> list[SimServer]:
        return [server for server in self._network.servers.values() if not server.gone.is_set()]

    @property
    def unproven(self) -> int:
        """Deaths caused by a prompt but charged to the servers: those before its conviction and those in a sync."""
        poisoned = sum(server.poisoned for server in self._network.servers.values())
        return poisoned - self._attributed + min(CROWD_DEATHS, self._attributed - self._refunded)

    def refund_restart(self, slot: int) -> None:
        self._refunded += 1
        super().refund_restart(slot)

    async def pin(self, count: int, version: int) -> list[str]:
        urls = await super().pin(count, version)
        for url in urls:
            self._invariants.note(f"{url} is pinned to version {version}")
            self._invariants.set_apart(url)
        return urls

    def unpin(self, urls: Iterable[str]) -> None:
        urls = list(urls)
        for url in urls:
            self._invariants.unpinned(url)
        super().unpin(urls)

    def _departed(self, slot: int, died: bool, requests_suspected: bool) -> None:
        server = self._network.servers.get(self._slots[slot].url)
        self._attributed += died and requests_suspected and server is not None and server.poisoned

    def _server_process(self, index: int) -> SimServer:
        network = self._network
        url = f"http://server:{self._driver}-{index}-{len(network.servers)}"
        server = SimServer(url, network.chance, network.invariants, self._config.rollout.stream_interval, self._poison)
        network.servers[url] = server
        return server

    def _router_process(self, servers: Collection[str], port: int) -> SimRouter:
        return self.router

    def _control(self, url: str, process: ServerProcess) -> ServerControl:
        return self.control(url)

    def control(self, url: str) -> ServerControl:
        """Calls to the simulated server at a URL."""
        control = ServerControl(url)
        session: Any = SimSession(self._network)
        control._sessions = {True: session, False: session}
        return control

    def _members(self, router_url: str) -> SimRouter:
        return self.router


class _NoPools:
    """A stand-in for the pools, without devices."""

    def remove_slot(self, pool: str, slot: int) -> None: ...
