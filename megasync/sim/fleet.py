"""The real fleet over simulated processes, with its health state machines, restarts and router slot."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megasync.cluster.fleet import Fleet
from megasync.config import Config
from megasync.rollout.suspects import CROWD_DEATHS
from megasync.sim.chance import Chance
from megasync.sim.client import SimControl
from megasync.sim.language import VOCABULARY
from megasync.sim.laws import Laws
from megasync.sim.network import Network
from megasync.sim.servers import SimRouter, SimServer


class SimFleet(Fleet):
    """The fleet of driver number `life`, which keeps URLs unique. Prompts with the token `poison` kill servers."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        life: int,
        chance: Chance,
        laws: Laws,
        network: Network,
        poison: int | None,
        clock: Callable[[], float],
    ) -> None:
        # No process of this fleet is real, so it needs neither a device nor pools.
        device: Any = None
        pools: Any = _Anywhere()
        super().__init__(config, run_dir, device, pools, "key", VOCABULARY, clock)
        self.router = network.router = SimRouter(chance)
        self._network = network
        self._poison = poison
        self._life = life
        self._chance = chance
        self._laws = laws
        # Deaths caused by a prompt that were attributed to requests, and deaths that were excused.
        self._blamed = self._excused = 0
        self.on_departure(self._left)

    def up(self) -> list[SimServer]:
        return [server for server in self._network.servers.values() if not server.gone.is_set()]

    @property
    def unproven(self) -> int:
        """Deaths caused by a prompt but charged to the servers: those before its conviction and those in a sync."""
        poisoned = sum(server.poisoned for server in self._network.servers.values())
        return poisoned - self._blamed + min(CROWD_DEATHS, self._blamed - self._excused)

    def refund_restart(self, slot: int) -> None:
        self._excused += 1
        super().refund_restart(slot)

    def _left(self, slot: int, died: bool, requests_suspected: bool) -> None:
        server = self._network.servers.get(self._slots[slot].url)
        self._blamed += died and requests_suspected and server is not None and server.poisoned

    def _server_process(self, index: int) -> SimServer:
        servers = self._network.servers
        url = f"http://server:{self._life}-{index}-{len(servers)}"
        servers[url] = SimServer(url, self._chance, self._laws, self._config.rollout.stream_interval, self._poison)
        return servers[url]

    def _router_process(self, servers: Collection[str], port: int) -> SimRouter:
        return self.router

    def _control(self, url: str) -> SimControl:
        return SimControl(self._network.servers[url], self._network)

    def _members(self, router_url: str) -> SimRouter:
        return self.router


class _Anywhere:
    """A stand-in for the pools, without devices."""

    def remove_slot(self, pool: str, slot: int) -> None: ...
