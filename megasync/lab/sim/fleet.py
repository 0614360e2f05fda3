"""The real fleet over simulated processes, with its health state machines, restarts and router slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.reservations import Reservations
from megasync.cluster.router_slot import RouterSlot
from megasync.cluster.server_slot import ServerProcess
from megasync.cluster.slots import Slots
from megasync.lab.sim.invariants import Invariants
from megasync.lab.sim.language import VOCABULARY
from megasync.lab.sim.network import Network, SimSession
from megasync.lab.sim.servers import SimRouter, SimServer
from megasync.lab.sim.world import World
from megasync.observe.context import RunContext
from megasync.rollout.placement import CROWD_DEATHS
from megasync.serving.control import ServerControl


class SimProcesses(FleetProcesses):
    """Simulated servers of one driver, whose number keeps URLs unique. Prompts with the token `poison` kill them."""

    def __init__(self, world: World, driver: int, network: Network, poison: int | None) -> None:
        self.simulated_router = network.router = SimRouter(network.chance)
        self._network = network
        self._poison = poison
        self._driver = driver
        self._stream_interval = world.config.rollout.stream_interval

    @property
    def shared_devices(self) -> None:
        return None

    async def place(self, index: int) -> None: ...

    def release(self, index: int) -> None: ...

    def server(self, index: int, shared_gpus: Sequence[str] = ()) -> SimServer:
        network = self._network
        url = f"http://server:{self._driver}-{index}-{len(network.servers)}"
        network.servers[url] = SimServer(url, network.chance, network.invariants, self._stream_interval, self._poison)
        return network.servers[url]

    def router(self, servers: Collection[str], port: int) -> SimRouter:
        return self.simulated_router

    def control(self, url: str, process: ServerProcess | None = None) -> ServerControl:
        control = ServerControl(url)
        session: Any = SimSession(self._network)
        control._sessions = {True: session, False: session}
        return control

    def members(self, router_url: str) -> SimRouter:
        return self.simulated_router


class SimReservations(Reservations):
    """Reservations that the invariants learn of."""

    def __init__(
        self, invariants: Invariants, slots: Slots, router: RouterSlot, newest_version: Callable[[], int | None]
    ) -> None:
        super().__init__(slots, router, newest_version)
        # Deaths caused by a prompt whose restarts were refunded.
        self.refunded = 0
        self._invariants = invariants
        invariants.pinned = lambda: {server.url for server in self.pinned()}

    def refund_restart(self, slot: int) -> None:
        self.refunded += 1
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


class SimFleet(Fleet):
    """The fleet of one driver."""

    reservations: SimReservations

    def __init__(self, world: World, driver: int, network: Network, poison: int | None, context: RunContext) -> None:
        processes = SimProcesses(world, driver, network, poison)
        reservations = partial(SimReservations, network.invariants)
        super().__init__(world.config, processes, VOCABULARY, context, reservations)
        self.simulated_router = processes.simulated_router
        # Calls to the simulated server at a URL.
        self.control = processes.control
        self._network = network
        # Deaths caused by a prompt that were attributed to requests.
        self._attributed = 0
        self.on_departure(self._departed)

    def up(self) -> list[SimServer]:
        return [server for server in self._network.servers.values() if not server.gone.is_set()]

    @property
    def unproven(self) -> int:
        """Deaths caused by a prompt but charged to the servers: those before its conviction and those in a sync."""
        poisoned = sum(server.poisoned for server in self._network.servers.values())
        # Before a conviction, requests for the prompt may kill several servers at the same time.
        most = CROWD_DEATHS * self._config.rollout.servers
        return poisoned - self._attributed + min(most, self._attributed - self.reservations.refunded)

    def _departed(self, slot: int, died: bool, requests_suspected: bool) -> None:
        server = self._network.servers.get(self.slots[slot].url)
        self._attributed += died and requests_suspected and server is not None and server.poisoned
