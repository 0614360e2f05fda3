"""The real fleet, with its health machines, restarts and router slot, over simulated processes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megasync.cluster.fleet import Fleet
from megasync.config import Config
from megasync.sim.chance import Chance
from megasync.sim.laws import Laws
from megasync.sim.servers import SimControl, SimRouter, SimServer


class SimFleet(Fleet):
    """`servers` are those that were ever started, by URL; `life` numbers the driver, so that no URL comes twice."""

    def __init__(
        self, config: Config, run_dir: Path, life: int, chance: Chance, laws: Laws, clock: Callable[[], float]
    ) -> None:
        # Neither device nor pools: no process of this fleet is real.
        device: Any = None
        pools: Any = _Anywhere()
        super().__init__(config, run_dir, device, pools, "key", clock)
        self.servers: dict[str, SimServer] = {}
        self.router = SimRouter(chance, laws)
        self._life = life
        self._chance = chance
        self._laws = laws

    def up(self) -> list[SimServer]:
        return [server for server in self.servers.values() if not server.gone.is_set()]

    def _server_process(self, index: int) -> SimServer:
        url = f"http://server:{self._life}-{index}-{len(self.servers)}"
        self.servers[url] = SimServer(url, self._chance, self._laws)
        return self.servers[url]

    def _router_process(self, servers: Collection[str], port: int) -> SimRouter:
        return self.router

    def _control(self, url: str) -> SimControl:
        return SimControl(self.servers[url])

    def _members(self, router_url: str) -> SimRouter:
        return self.router


class _Anywhere:
    """Pools without devices."""

    def remove_slot(self, pool: str, slot: int) -> None: ...
