"""The rollout pool: servers that come and go, and the router in front of those that serve.

      slots (server_slot) ──▶ joiners ──(a complete sync: `joined`)──▶ serving ──▶ router's list ──▶ requests
           ▲    │                ▲                                        │
           │    └── died ────────┼──────────────── `sync_failed` ─────────┘
           └── restart ──────────┘

    task          does                                    ends when
    ------------  --------------------------------------  -------------------------------------------
    one per slot  watches a server and restarts it        the slot is retired
    router        keeps the router and its list           its restart budget is spent: `watch` raises

Invariant: the router lists only servers in `serving`, without those that are isolated for a suspected prompt
(`isolate`), and a server serves only after `joined` (`ServerHealth.serves`). The only exception is the first list,
before any request is sent: a run generates only after its first `joined`.

A pinned server (`pin`) is healthy but not in `serving`: it has left the router, and syncs leave it out, so it keeps its
version. When it is unpinned it serves again if nothing newer was published, and is a joiner otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import structs

from megasync.cluster.fleet_processes import FleetProcesses, server_name
from megasync.cluster.router_slot import RouterSlot
from megasync.cluster.server_slot import CHECK, ServerSlot, raise_supervision_error
from megasync.cluster.slot_faults import SlotFaults
from megasync.concurrency.tasks import cancel_and_wait, gather_or_cancel
from megasync.config import Config
from megasync.config.pools import server_devices
from megasync.errors import MegasyncError, ServerError
from megasync.observe.events import NO_EVENTS, EventSink
from megasync.observe.hang import NO_REPORTS, HangSink, RunProcess
from megasync.observe.state_file import ProcessState
from megasync.rollout.inflight import ServerLoad
from megasync.serving.answers import AnswerLimits
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.health import ServerState
from megasync.serving.outliers import OutlierDetector

log = logging.getLogger(__name__)

# Seconds to wait until the router has applied a change of its list; it keeps trying after that.
SETTLE_SECONDS = 30.0
# Seconds for a server to finish aborting its requests, which continue elsewhere. It is stopped afterwards in any case.
DRAIN_SECONDS = 10.0
# Checks of answers per second, when all servers are to be checked at once.
CHECKS_PER_SECOND = 50.0
# Seconds between two looks whether servers still hold memory that they were to release.
RELEASE_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Pin:
    """The version that a server is kept at. `over` is set once it no longer is."""

    version: int
    over: asyncio.Event


class Fleet:
    """Starts, supervises and resizes the servers and their router."""

    def __init__(
        self,
        config: Config,
        processes: FleetProcesses,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._processes = processes
        self._clock = clock
        self._slots: dict[int, ServerSlot] = {}
        # The same slots by their reported state, and by the URL of their server while it is up.
        self._by_state: dict[ServerState, set[ServerSlot]] = {state: set() for state in ServerState}
        self._by_url: dict[str, ServerSlot] = {}
        self._tasks: dict[ServerSlot | None, asyncio.Task] = {}
        self._changed = asyncio.Event()
        self._resizing = asyncio.Lock()
        self._last_retired = ""
        self._router = RouterSlot(processes.router, self._routed_urls, processes.members, config, clock)
        self._outliers = OutlierDetector(clock)
        # The newest weight version that a server can hold; None where it is unknown.
        self.newest_version: Callable[[], int | None] = lambda: None
        self.limits = AnswerLimits(
            vocab_size, CHECK["sampling_params"]["max_new_tokens"], newest=lambda: self.newest_version()
        )
        self.streams = config.rollout.stream_interval > 0
        # Slots that serve but are kept out of the router.
        self._isolated: set[int] = set()
        # The same, of servers that syncs leave out, by slot.
        self._pinned: dict[int, _Pin] = {}
        self._on_departures: list[Callable[[int, bool, bool], None]] = []
        self._gray: Counter[str] = Counter()
        self._followers: list[tuple[Callable[[ServerControl], None], Callable[[str], None]]] = []
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._faults = SlotFaults(NO_EVENTS)
        self.reports: HangSink = NO_REPORTS

    def report_to(self, events: EventSink) -> None:
        """Records faults and recoveries of the servers and the router there."""
        self._faults = SlotFaults(events)
        self._router.events = events

    def processes(self) -> list[RunProcess]:
        """The running processes of the servers and the router."""
        servers = [process for slot in self._slots.values() for process in slot.processes(server_name(slot.index))]
        return servers + self._router.processes()

    @property
    def router_url(self) -> str:
        """Known once `start` has returned."""
        return self._router.url

    async def start(self, shared_gpus: Sequence[str] = ()) -> None:
        """Starts the servers concurrently, then the router. Raises MegasyncError, with the log, when one fails.

        ``shared_gpus`` are those of the trainer ranks, if the servers share them.
        """
        self._processes.shared_gpus = shared_gpus
        slots = [self._new_slot(index) for index in range(self._config.rollout.servers)]
        await gather_or_cancel(*(slot.start() for slot in slots))
        await self._router.start([slot.url for slot in slots])
        log.info("Servers: %s; router: %s", [slot.url for slot in slots], self.router_url)
        for slot in slots:
            self._supervise(slot)

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
        present = [slot.control for slot in self._slots.values() if slot.health.up and slot.control]
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

    def serving(self) -> list[ServerControl]:
        """Servers that hold the published version and take part in syncs, in slot order."""
        return [slot.control for slot in self._unpinned() if slot.control]

    def joiners(self) -> list[ServerControl]:
        """Servers that are up and wait for a sync to the published version."""
        return self._controls(ServerState.STALE)

    def metrics_urls(self) -> dict[str, str]:
        """Where the metrics of each server that is up, and of the router, can be scraped. Safe in any thread."""
        urls: dict[str, str] = {}
        for url, slot in list(self._by_url.items()):
            name, control = server_name(slot.index), slot.control
            if isinstance(control, DisaggregatedControl):
                each = enumerate(control.engine_urls)
                urls |= {f"{name}-engine-{number}": f"{engine}/metrics" for number, engine in each}
            else:
                urls[name] = f"{url}/metrics"
        return urls | ({"router": self._router.metrics_url} if self._router.metrics_url else {})

    async def changed(self) -> None:
        """Returns when a server has come up or gone since the last call; for one caller."""
        await self._changed.wait()
        self._changed.clear()

    async def joined(self, urls: Collection[str]) -> None:
        """Adds these servers to the router: a complete sync has delivered the published version to them."""
        for slot in self._at(urls):
            slot.note(slot.health.synced)
        if None not in self._tasks:
            self._tasks[None] = asyncio.create_task(self._router.run(), name="router")
        await self._settle()

    @contextmanager
    def syncing(self, urls: Collection[str]) -> Iterator[None]:
        """Context of a weight sync to these servers: requests are not suspected if one dies in it."""
        slots = self._at(urls)
        for slot in slots:
            slot.health.sync_began()
        try:
            yield
        finally:
            for slot in slots:
                slot.health.sync_ended()

    async def parity_failed(self, reasons: Mapping[str, str]) -> None:
        """Restarts these servers: they alone compute different log-probs from the trainer's for the same weights."""
        for slot in self._at(reasons):
            if slot.health.up:
                self._gray["parity"] += 1
                slot.note(slot.health.mark_dead, reasons[slot.url])
        await self._settle()

    async def sync_failed(self, reasons: Mapping[str, str]) -> None:
        """Takes these servers out of the router; their requests continue elsewhere.

        Each is stale until a later sync. One that does not finish aborting its requests, or whose syncs keep failing,
        is restarted.
        """
        slots = self._at(reasons)
        for slot in slots:
            slot.note(slot.health.sync_failed, reasons[slot.url])
        await self._settle()
        drained = await asyncio.gather(*(slot.drain(DRAIN_SECONDS) for slot in slots))
        for slot in (slot for slot, done in zip(slots, drained, strict=True) if not done and slot.health.up):
            tail = await slot.log_tail()
            await self.reports.report(
                f"{server_name(slot.index)} does not abort its requests", {server_name(slot.index)}
            )
            # Its own supervision may have declared it dead meanwhile.
            if slot.health.up:
                reason = f"it did not abort its requests after a failed sync. Last lines of its log:\n{tail}"
                slot.note(slot.health.died, reason)

    # Devices that the trainer ranks use in turns with the servers

    async def release_memory(self) -> None:
        """Frees the devices: no server computes, and none starts, until `resume_memory`. Requests wait.

        Servers that start must be up first. Raises ServerError if one still holds memory after the time for that.
        """
        self._may_start.clear()
        timeouts = self._config.timeouts
        deadline = self._clock() + timeouts.server_start + timeouts.weight_sync + timeouts.shutdown
        while holders := [slot for slot in self._slots.values() if slot.holds_memory]:
            if self._clock() > deadline:
                raise ServerError(
                    f"servers {', '.join(str(slot.index) for slot in holders)} neither released their memory nor ended"
                )
            await asyncio.gather(*(slot.release_memory(timeouts.weight_sync) for slot in holders))
            await asyncio.sleep(RELEASE_POLL_SECONDS)

    async def resume_memory(self) -> None:
        """Lets the servers compute and start again: they hold what they held before."""
        seconds = self._config.timeouts.weight_sync
        await asyncio.gather(*(slot.resume_memory(seconds) for slot in self._slots.values()))
        self._may_start.set()

    async def watch(self) -> None:
        """Raises ServerError when the fleet cannot recover: too few servers are left, or the router stays down."""
        raise_supervision_error(self._tasks.values())
        left, least = len(self._slots), self._config.rollout.min_servers
        if left < least:
            raise ServerError(f"{left} servers are left, fewer than rollout.min_servers={least}. {self._last_retired}")

    async def resize(self, servers: int) -> str:
        """Adds or removes servers up to this number; returns a description of the change.

        An added server serves after the next weight sync. A removed one leaves the router first, and its requests
        continue elsewhere. Raises MegasyncError when the cluster has no room or a server does not start; the others
        stay.
        """
        least = self._config.rollout.min_servers
        if self._config.rollout.external:
            raise ServerError("the servers of this run are those of rollout.external; a running run cannot change them")
        width = server_devices(self._config.rollout)
        if (room := self._processes.shared_devices) is not None and servers * width > room:
            raise ServerError(
                f"rollout={servers}: the devices of the trainer ranks (cluster.colocate) have room for {room // width}"
            )
        if servers < least:
            raise ServerError(f"rollout={servers} is below rollout.min_servers={least}; ask for {least} or more")
        async with self._resizing:
            before = len(self._slots)
            if servers > before:
                await self._grow(servers - before)
            else:
                await asyncio.gather(*(self._remove(slot) for slot in self._least_useful(before - servers)))
        if servers == before:
            return f"there are already {servers} servers"
        note = "; the new ones serve after the next weight sync" if servers > before else ""
        return f"{before} -> {servers} servers{note}"

    async def visible_devices(self, index: int) -> str:
        """The GPUs of server `index`, for processes that share them. Raises MegasyncError while it does not run."""
        return await self._slots[index].visible_devices()

    def loads(self) -> list[ServerLoad]:
        """The latest report of each server that the router sends requests to."""
        return [slot.load for slot in self._routed() if slot.load is not None]

    def check_all(self) -> None:
        """Checks all servers soon, because an unknown one of them gave an invalid answer."""
        for number, slot in enumerate(self._slots.values()):
            slot.check_soon(number / CHECKS_PER_SECOND)

    # One isolated server, for suspected requests

    async def isolate(self, avoid: Collection[int]) -> tuple[int, str] | None:
        """Takes a serving server out of the router and aborts its requests, which continue elsewhere.

        Returns its slot and URL, or None when no server could be isolated. Prefers a slot outside `avoid`.
        """
        if not (serving := self._unpinned()):
            return None
        slot = min(serving, key=lambda slot: slot.index in avoid)
        url = slot.url
        self._isolated.add(slot.index)
        await self._settle()
        drained = await slot.drain(DRAIN_SECONDS)
        if drained and slot.health.serves and slot.url == url:
            return slot.index, url
        self.release(slot.index)
        return None

    def release(self, slot: int) -> None:
        """Ends the isolation of a slot: the router may send requests to it again."""
        self._isolated.discard(slot)
        self._router.refresh()

    # Servers that keep a version, for an evaluation

    @property
    def size(self) -> int:
        """The number of servers, whatever their state, without those that are lost for good."""
        return len(self._slots)

    async def pin(self, count: int, version: int) -> list[str]:
        """Takes up to `count` servers out of the router and of weight syncs, and aborts their requests.

        They hold `version`, the published one, until `unpin`. Prefers those with the fewest requests; another server
        always stays in the router. Returns their URLs, none if there is no server to spare. Whatever syncs begin after
        this call leave them out: it marks them before it first waits.
        """

        def burden(slot: ServerSlot) -> tuple[bool, int, int]:
            requests = 0 if slot.load is None else slot.load.running + slot.load.waiting
            return slot.health.state is ServerState.SUSPECT, requests, -slot.index

        routed = self._routed()
        chosen = {slot: slot.url for slot in sorted(routed, key=burden)[: max(0, min(count, len(routed) - 1))]}
        for slot in chosen:
            self._pinned[slot.index] = _Pin(version, asyncio.Event())
        if not chosen:
            return []
        try:
            alone = await self._settle()
            drained = await asyncio.gather(*(slot.drain(DRAIN_SECONDS) for slot in chosen))
        except BaseException:
            self.unpin(chosen.values())
            raise
        self.unpin(url for url, done in zip(chosen.values(), drained, strict=True) if not (alone and done))
        return [url for slot, url in chosen.items() if slot.index in self._pinned and slot.url == url]

    def unpin(self, urls: Iterable[str]) -> None:
        """Lets pinned servers serve again: at once if nothing newer can be on any server, else after a sync."""
        for slot in self._at(urls):
            if (pin := self._pinned.pop(slot.index, None)) is None:
                continue
            pin.over.set()
            if (newest := self.newest_version()) != pin.version:
                reason = f"it was kept at version {pin.version} for an evaluation; the newest is {newest}"
                slot.note(slot.health.missed_sync, reason)
        self._router.refresh()

    def pinned(self) -> list[ServerControl]:
        """Servers that `pin` took, in slot order."""
        return [control for index in sorted(self._pinned) if (control := self._slots[index].control)]

    async def unpinned(self, url: str) -> None:
        """Returns once the server at this URL is not pinned: it has died, or `unpin` was called."""
        if (slot := self._by_url.get(url)) is not None and (pin := self._pinned.get(slot.index)) is not None:
            await pin.over.wait()

    def refund_restart(self, slot: int) -> None:
        """A request caused a death of this slot's server, so the slot is not charged with a restart."""
        if slot in self._slots:
            self._slots[slot].health.refund_restart()

    def states(self) -> list[ProcessState]:
        """Every server, for `state.json`, in slot order."""
        return [self._described(slot) for _, slot in sorted(self._slots.items())]

    def _described(self, slot: ServerSlot) -> ProcessState:
        state = slot.described(server_name(slot.index))
        if (pin := self._pinned.get(slot.index)) is None:
            return state
        return structs.replace(state, version=pin.version, reason=state.reason or "pinned for an evaluation")

    def router_state(self) -> ProcessState:
        """The router, for `state.json`."""
        return self._router.described()

    def metrics(self) -> dict[str, float]:
        """Servers by state, and restarts of servers and router."""
        restarts = sum(slot.starts - 1 for slot in self._slots.values())
        return {
            f"fleet/{state}": float(len(self._by_state[state]))
            for state in ServerState
            if state is not ServerState.RETIRED
        } | {
            "fleet/restarts": float(restarts),
            "fleet/router_restarts": float(self._router.starts - 1),
            "fleet/isolated": float(len(self._isolated)),
            "fleet/pinned": float(len(self._pinned)),
            **{f"fleet/gray_{fault}": float(self._gray[fault]) for fault in ("answers", "slow", "parity")},
        }

    # `server_slot.Judge` of the slots

    def reported(self, slot: int, load: ServerLoad) -> str | None:
        return self._count_fault("slow", self._outliers.reported(slot, load))

    def checked(self, slot: int, problem: str | None) -> str | None:
        return self._count_fault("answers", self._outliers.checked(slot, problem))

    def unanswered(self, slot: int) -> None:
        self._outliers.unanswered(slot)

    def _count_fault(self, fault: str, reason: str | None) -> str | None:
        self._gray[fault] += reason is not None
        return reason

    async def stop(self) -> None:
        try:
            await cancel_and_wait(*self._tasks.values())
        finally:
            self._tasks.clear()
            await asyncio.gather(self._router.close(), *(slot.close() for slot in self._slots.values()))
            for slot in [*self._slots.values()]:
                self._forget(slot)

    # Slots

    def _new_slot(self, index: int) -> ServerSlot:
        slot = self._slots[index] = ServerSlot(
            self._config,
            index,
            lambda: self._processes.server(index),
            self._processes.control,
            self._on_change,
            self._clock,
            judge=self,
            may_start=self._may_start,
        )
        name = server_name(index)
        slot.on_silent = lambda reason: self.reports.report(f"{name} does not answer: {reason}", {name})
        self._by_state[slot.health.state].add(slot)
        return slot

    def _forget(self, slot: ServerSlot) -> None:
        del self._slots[slot.index]
        for slots in self._by_state.values():
            slots.discard(slot)

    def _supervise(self, slot: ServerSlot) -> None:
        async def run() -> None:
            await slot.run()
            # It has retired, and its process has ended.
            self._processes.release(slot.index)
            del self._tasks[slot]

        self._tasks[slot] = asyncio.create_task(run(), name=f"server {slot.index}")

    def _in_state(self, *states: ServerState) -> list[ServerSlot]:
        """The slots in these states, in order."""
        return sorted((slot for state in states for slot in self._by_state[state]), key=lambda slot: slot.index)

    def _controls(self, *states: ServerState) -> list[ServerControl]:
        return [slot.control for slot in self._in_state(*states) if slot.control]

    def _at(self, urls: Iterable[str]) -> list[ServerSlot]:
        return [self._by_url[url] for url in urls if url in self._by_url]

    def _on_change(self, slot: ServerSlot, before: ServerState) -> None:
        state = slot.health.state
        self._faults.changed(server_name(slot.index), slot, before)
        self._by_state[before].discard(slot)
        self._by_state[state].add(slot)
        if state.up and not before.up and slot.control:
            self._by_url[slot.url] = slot
            for on_up, _ in self._followers:
                on_up(slot.control)
        elif before.up and not state.up:
            self._by_url.pop(slot.url, None)
            for _, on_gone in self._followers:
                on_gone(slot.url)
        if before.serves and not state.serves:
            self._isolated.discard(slot.index)
            if (pin := self._pinned.pop(slot.index, None)) is not None:
                pin.over.set()
            self._outliers.left(slot.index)
            for on_left in self._on_departures:
                on_left(slot.index, state is ServerState.DEAD, slot.health.requests_suspected)
        if state is ServerState.RETIRED:
            self._forget(slot)
            self._outliers.retired(slot.index)
            self._last_retired = f"The last server lost was {slot.index}: {slot.health.reason}"
        self._router.refresh()
        self._changed.set()

    def _routed(self) -> list[ServerSlot]:
        """The slots that the router should list, in order."""
        return [slot for slot in self._unpinned() if slot.index not in self._isolated]

    def _unpinned(self) -> list[ServerSlot]:
        """The slots that serve the published version, in order."""
        serving = self._in_state(ServerState.HEALTHY, ServerState.SUSPECT)
        return [slot for slot in serving if slot.index not in self._pinned]

    def _routed_urls(self) -> list[str]:
        return [slot.url for slot in self._routed() if slot.url]

    async def _settle(self) -> bool:
        """Returns whether the router has applied its list."""
        if None in self._tasks and not await self._router.settle(SETTLE_SECONDS):
            log.warning("Router did not apply its new list within %.0f s; retrying in the background", SETTLE_SECONDS)
            return False
        return True

    # Resizing

    async def _grow(self, count: int) -> None:
        free = (index for index in range(len(self._slots) + count + 1) if index not in self._slots)
        results = await asyncio.gather(*(self._add(next(free)) for _ in range(count)), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, MegasyncError):
                raise error
        if errors:
            raise ServerError(f"{count - len(errors)} of {count} servers were added; {errors[0]}")

    async def _add(self, index: int) -> None:
        await self._processes.place(index)
        slot = self._new_slot(index)
        try:
            await slot.start()
        except BaseException:
            self._forget(slot)
            self._processes.release(index)
            raise
        self._supervise(slot)

    def _least_useful(self, count: int) -> list[ServerSlot]:
        """Servers to remove: those that do not serve first, then the latest, pinned ones last."""

        def use(slot: ServerSlot) -> tuple[bool, bool, int]:
            return slot.health.serves, slot.index in self._pinned, -slot.index

        return sorted(self._slots.values(), key=use)[:count]

    async def _remove(self, slot: ServerSlot) -> None:
        """Removes it from the router, then aborts its requests, then stops the process."""
        slot.note(slot.health.retire, "removed by a resize")
        task = self._tasks.pop(slot, None)
        if task is not None:
            await cancel_and_wait(task)
        await self._settle()
        await slot.drain(DRAIN_SECONDS)
        await slot.close()
        self._processes.release(slot.index)
