"""The rollout pool: servers that come and go, and the router in front of those that serve.

      slots (server_slot) ──▶ joiners ──(a complete sync: `joined`)──▶ serving ──▶ router's list ──▶ requests
           ▲    │                ▲                                        │
           │    └── died ────────┼──────────────── `sync_failed` ─────────┘
           └── restart ──────────┘

    part              does                                                             waits end when
    ----------------  ---------------------------------------------------------------  --------------------------------
    `slots`           watch servers and restart them, a task each                      the slot is retired
    `router`          keeps the router and its list                                    its restart budget is spent:
                                                                                       `watch` raises
    `reservations`    keep servers out of the router: for suspects, for an evaluation  released, or the server is gone
    `scaling`         adds and removes servers                                         the change is complete

Invariant: the router lists only servers that serve and are not reserved (`Reservations.routed`), and a server serves
only after `joined` (`ServerHealth.serves`). The only exception is the first list, before any request is sent: a run
generates only after its first `joined`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import structs

from megasync.cluster.fleet_processes import FleetProcesses, server_name
from megasync.cluster.gray_failures import GrayFailures
from megasync.cluster.reservations import Reservations
from megasync.cluster.router_slot import RouterSlot
from megasync.cluster.scaling import Scaling
from megasync.cluster.server_slot import ServerSlot
from megasync.cluster.slots import Slots
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.errors import ServerError
from megasync.observe.context import RunContext
from megasync.observe.hang import RunProcess
from megasync.observe.state_file import ProcessState
from megasync.rollout.inflight import ServerLoad
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.health import ServerState

log = logging.getLogger(__name__)

# Checks of answers per second, when all servers are to be checked at once.
CHECKS_PER_SECOND = 50.0
# Seconds between two looks whether servers still hold memory that they were to release.
RELEASE_POLL_SECONDS = 0.05


class Fleet:
    """Starts the servers and their router, and knows which of them serve, join or have gone."""

    def __init__(
        self,
        config: Config,
        processes: FleetProcesses,
        vocab_size: int,
        context: RunContext,
        reservations: Callable[[Slots, RouterSlot, Callable[[], int | None]], Reservations] = Reservations,
    ) -> None:
        self._config = config
        self._processes = processes
        self._reports = context.reports
        self._clock = context.clock
        self._shared_gpus: Sequence[str] = ()
        self._changed = asyncio.Event()
        self._gray = GrayFailures(vocab_size, config.rollout.stream_interval > 0, context)
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._on_departures: list[Callable[[int, bool, bool], None]] = []
        self._followers: list[tuple[Callable[[ServerControl], None], Callable[[str], None]]] = []
        self.slots = Slots(config, context, server_name, self._on_change, processes.release)
        self.router = RouterSlot(config, context, processes.router, processes.members, self._routed_urls)
        self.reservations = reservations(self.slots, self.router, context.newest_version)
        self.scaling = Scaling(config.rollout, processes, self.slots, self.router, self.reservations, self._new_slot)

    async def start(self, shared_gpus: Sequence[str] = ()) -> None:
        """Starts the servers concurrently, then the router. Raises MegasyncError, with the log, when one fails.

        ``shared_gpus`` are those of the trainer ranks, if the servers share them.
        """
        self._shared_gpus = shared_gpus
        slots = [self._new_slot(number) for number in range(self._config.rollout.servers)]
        await gather_or_cancel(*(slot.start() for slot in slots))
        await self.router.start([slot.url for slot in slots])
        log.info("Servers: %s; router: %s", [slot.url for slot in slots], self.router.url)
        for slot in slots:
            self.slots.supervise(slot)

    async def stop(self) -> None:
        await asyncio.gather(self.router.stop(), self.slots.stop())

    def follow(
        self,
        on_up: Callable[[ServerControl], None],
        on_gone: Callable[[str], None],
        known: Collection[ServerControl] = (),
    ) -> None:
        """Calls `on_up` for every server that comes up and `on_gone` with the URL of each that goes.

        The first calls cover what has changed since the follower learned of the servers in `known`.
        """
        self._followers.append((on_up, on_gone))
        present = [slot.control for slot in self.slots if slot.health.up and slot.control]
        for control in known:
            if control not in present:
                on_gone(control.url)
        for control in present:
            if control not in known:
                on_up(control)

    def on_departure(self, on_left: Callable[[int, bool, bool], None]) -> None:
        """Calls `on_left(slot, died, requests_suspected)` when a slot stops serving.

        `requests_suspected` is whether requests may have caused the death.
        """
        self._on_departures.append(on_left)

    # The controller's side

    @property
    def size(self) -> int:
        """The number of servers, whatever their state, without those that are lost for good."""
        return len(self.slots)

    def serving(self) -> list[ServerControl]:
        """Servers that hold the published version and take part in syncs, in slot order."""
        return [slot.control for slot in self.reservations.published() if slot.control]

    def joiners(self) -> list[ServerControl]:
        """Servers that are up and wait for a sync to the published version."""
        return [slot.control for slot in self.slots if slot.health.state is ServerState.STALE and slot.control]

    async def changed(self) -> None:
        """Returns when a server has come up or gone since the last call; for one caller."""
        await self._changed.wait()
        self._changed.clear()

    async def joined(self, urls: Collection[str]) -> None:
        """Adds these servers to the router: a complete sync has delivered the published version to them."""
        for slot in self.slots.at(urls):
            slot.note(slot.health.synced)
        self.router.supervise()
        await self.router.settle()

    @contextmanager
    def syncing(self, urls: Collection[str]) -> Iterator[None]:
        """Context of a weight sync to these servers: requests are not suspected if one dies in it."""
        slots = self.slots.at(urls)
        for slot in slots:
            slot.health.sync_began()
        try:
            yield
        finally:
            for slot in slots:
                slot.health.sync_ended()

    async def parity_failed(self, reasons: Mapping[str, str]) -> None:
        """Restarts these servers: they alone compute different log-probs from the trainer's for the same weights."""
        for slot in self.slots.at(reasons):
            self._gray.restarts["parity"] += 1
            slot.note(slot.health.mark_dead, reasons[slot.url])
        await self.router.settle()

    async def sync_failed(self, reasons: Mapping[str, str]) -> None:
        """Takes these servers out of the router; their requests continue elsewhere.

        Each is stale until a later sync. One that does not finish aborting its requests, or whose syncs keep failing,
        is restarted.
        """
        slots = self.slots.at(reasons)
        for slot in slots:
            slot.note(slot.health.sync_failed, reasons[slot.url])
        await self.router.settle()
        drained = await asyncio.gather(*(slot.drain() for slot in slots))
        for slot in (slot for slot, done in zip(slots, drained, strict=True) if not done and slot.health.up):
            tail = await slot.log_tail()
            await self._reports.report(f"{slot.name} does not abort its requests", {slot.name})
            # Its own supervision may have declared it dead meanwhile.
            if slot.health.up:
                reason = f"it did not abort its requests after a failed sync. Last lines of its log:\n{tail}"
                slot.note(slot.health.died, reason)

    async def watch(self) -> None:
        """Raises ServerError when the fleet cannot recover: too few servers are left, or the router stays down."""
        self.router.watch()
        self.slots.watch()
        left, least = len(self.slots), self._config.rollout.min_servers
        if left < least:
            raise ServerError(
                f"{left} servers are left, fewer than rollout.min_servers={least}. {self.slots.last_lost}"
            )

    # Devices that the trainer ranks use in turns with the servers

    async def release_memory(self) -> None:
        """Frees the devices: no server computes, and none starts, until `resume_memory`. Requests wait.

        Servers that start must be up first. Raises ServerError if one still holds memory after the time for that.
        """
        self._may_start.clear()
        timeouts = self._config.timeouts
        deadline = self._clock() + timeouts.server_start + timeouts.weight_sync + timeouts.shutdown
        while holders := [slot for slot in self.slots if slot.holds_memory]:
            if self._clock() > deadline:
                raise ServerError(
                    f"servers {', '.join(str(slot.index) for slot in holders)} neither released their memory nor ended"
                )
            await asyncio.gather(*(slot.release_memory(timeouts.weight_sync) for slot in holders))
            await asyncio.sleep(RELEASE_POLL_SECONDS)

    async def resume_memory(self) -> None:
        """Lets the servers compute and start again: they hold what they held before."""
        seconds = self._config.timeouts.weight_sync
        await asyncio.gather(*(slot.resume_memory(seconds) for slot in self.slots))
        self._may_start.set()

    # What rollouts and observers ask

    def loads(self) -> list[ServerLoad]:
        """The latest report of each server that the router sends requests to."""
        return [slot.load for slot in self.reservations.routed() if slot.load is not None]

    def check_all(self) -> None:
        """Checks all servers soon, because an unknown one of them gave an invalid answer."""
        for number, slot in enumerate(self.slots):
            slot.check_soon(number / CHECKS_PER_SECOND)

    async def visible_devices(self, number: int) -> str:
        """The GPUs of a server, for processes that share them. Raises MegasyncError while it does not run."""
        return await self.slots[number].visible_devices()

    def processes(self) -> list[RunProcess]:
        """The running processes of the servers and the router."""
        return self.slots.processes() + self.router.processes()

    def states(self) -> list[ProcessState]:
        """Every server, for `state.json`, in slot order."""
        return [self._described(slot) for slot in self.slots]

    def _described(self, slot: ServerSlot) -> ProcessState:
        state = slot.described()
        if (version := self.reservations.pinned_version(slot)) is None:
            return state
        return structs.replace(state, version=version, reason=state.reason or "pinned for an evaluation")

    def metrics_urls(self) -> dict[str, str]:
        """Where the metrics of each server that is up, and of the router, can be scraped. Safe in any thread."""
        urls: dict[str, str] = {}
        for slot in self.slots:
            control = slot.control if slot.health.up else None
            if isinstance(control, DisaggregatedControl):
                each = enumerate(control.engine_urls)
                urls |= {f"{slot.name}-engine-{number}": f"{engine}/metrics" for number, engine in each}
            elif control is not None:
                urls[slot.name] = f"{control.url}/metrics"
        return urls | ({"router": self.router.metrics_url} if self.router.metrics_url else {})

    def metrics(self) -> dict[str, float]:
        """Servers by state, and restarts of servers and router."""
        states = [slot.health.state for slot in self.slots]
        return {
            f"fleet/{state}": float(states.count(state)) for state in ServerState if state is not ServerState.RETIRED
        } | {
            "fleet/restarts": float(self.slots.restarts),
            "fleet/router_restarts": float(self.router.starts - 1),
            **self.reservations.metrics(),
            **{f"fleet/gray_{fault}": float(self._gray.restarts[fault]) for fault in ("answers", "slow", "parity")},
        }

    def _new_slot(self, number: int) -> ServerSlot:
        processes = self._processes
        return self.slots.add(
            number, lambda: processes.server(number, self._shared_gpus), processes.control, self._gray, self._may_start
        )

    def _routed_urls(self) -> list[str]:
        return [slot.url for slot in self.reservations.routed() if slot.url]

    def _on_change(self, slot: ServerSlot, before: ServerState) -> None:
        state = slot.health.state
        if state.up and not before.up and slot.control:
            for on_up, _ in self._followers:
                on_up(slot.control)
        elif before.up and not state.up:
            for _, on_gone in self._followers:
                on_gone(slot.url)
        if before.serves and not state.serves:
            self.reservations.ended(slot)
            self._gray.outliers.left(slot.index)
            for on_left in self._on_departures:
                on_left(slot.index, state is ServerState.DEAD, slot.health.requests_suspected)
        if state is ServerState.RETIRED:
            self._gray.outliers.retired(slot.index)
        self.router.refresh()
        self._changed.set()
