"""The rollout pool: servers that come and go, and the router in front of those that serve. Their one owner in the driver.

      slots (server_slot) ──▶ joiners ──(a complete sync: `joined`)──▶ serving ──▶ router's list ──▶ requests
           ▲    │                ▲                                        │
           │    └── died ────────┼──────────────── `sync_failed` ─────────┘
           └── start again ──────┘

    task          does                                    ends when
    ------------  --------------------------------------  ---------------------------------------
    one a slot    watches a server, starts it again       the slot is retired
    router        keeps the router and its list            its restarts are used up: `watch` raises

Invariant: the router is told of `serving` servers only, without those that a suspected prompt has to itself (`isolate`), and
a server serves only after `joined` (`ServerHealth.serves`). The one exception is the very first list, before any request is
sent: a run generates after its first `joined`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megasync.cluster.actor_process import ActorProcess
from megasync.cluster.pools import Pools
from megasync.cluster.router_slot import RouterSlot
from megasync.cluster.server_slot import CHECK, ServerProcess, ServerSlot
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys, router_trust
from megasync.device import Device
from megasync.errors import MegasyncError, ServerError
from megasync.rollout.inflight import ServerLoad
from megasync.serving.answers import Asked
from megasync.serving.control import ServerControl
from megasync.serving.health import HealthPolicy, ServerHealth, ServerState
from megasync.serving.outliers import OutlierDetector
from megasync.serving.router import RouterMembers
from megasync.serving.server import ServerSpec

log = logging.getLogger(__name__)

# Seconds for the router to take a change of its list; it goes on trying after that.
SETTLE_SECONDS = 30.0
# Seconds for a server to let go of its aborted requests; it is ended all the same, and they go on elsewhere.
DRAIN_SECONDS = 10.0
# Seconds to wait for Ray to find room for an added server; it answers at once where there is some.
PLACE_SECONDS = 15.0


class Fleet:
    """`router_url` is known once `start` has returned."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        device: Device,
        pools: Pools,
        keys: Keys,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._clock = clock
        self._logs = run_dir / "logs"
        self._device = device
        self._pools = pools
        self._keys = keys
        health = config.rollout.health
        self._policy = HealthPolicy.of(health)
        self._slots: dict[int, ServerSlot] = {}
        self._tasks: dict[ServerSlot | None, asyncio.Task] = {}
        self._changed = asyncio.Event()
        self._resizing = asyncio.Lock()
        self._last_gone = ""
        self._router = RouterSlot(
            self._router_process,
            self._routed,
            health,
            config.timeouts.server_start,
            config.timeouts.shutdown,
            self._members,
            clock,
        )
        self._peers = OutlierDetector(clock)
        # The newest weight version that a server can hold; None where nobody knows it.
        self.newest_version: Callable[[], int | None] = lambda: None
        self.asked = Asked(vocab_size, CHECK["sampling_params"]["max_new_tokens"], newest=lambda: self.newest_version())
        self.streams = config.rollout.stream_interval > 0
        # Slots that are kept out of the router although they serve.
        self._isolated: set[int] = set()
        self._leavers: list[Callable[[int, bool, bool], None]] = []
        self._gray: Counter[str] = Counter()
        self._followers: list[tuple[Callable[[ServerControl], None], Callable[[str], None]]] = []

    @property
    def router_url(self) -> str:
        return self._router.url

    async def start(self) -> None:
        """Starts the servers together, then the router. Raises MegasyncError with the log's end when one does not start."""
        slots = [self._new_slot(index) for index in range(self._config.rollout.servers)]
        await gather_or_cancel(*(slot.start() for slot in slots))
        await self._router.start([slot.url for slot in slots])
        log.info("servers: %s; router: %s", [slot.url for slot in slots], self.router_url)
        for slot in slots:
            self._watch_over(slot)

    def follow(
        self,
        on_up: Callable[[ServerControl], None],
        on_gone: Callable[[str], None],
        known: Collection[ServerControl] = (),
    ) -> None:
        """Both hear of every server that comes up, and of the URL of each that goes, beginning with what has changed
        since the follower learned of those that it knows."""
        self._followers.append((on_up, on_gone))
        present = [slot.control for slot in self._slots.values() if slot.health.up]
        for control in known:
            if control not in present:
                on_gone(control.url)
        for control in present:
            if control not in known:
                on_up(control)

    def follow_deaths(self, on_left: Callable[[int, bool, bool], None]) -> None:
        """Told of each slot whose server serves no more, with whether it died, and whether requests may be the cause."""
        self._leavers.append(on_left)

    # What the controller asks and tells

    def serving(self) -> list[ServerControl]:
        """Servers that hold the published version and are in the router, in slot order."""
        return [slot.control for _, slot in sorted(self._slots.items()) if slot.health.serves and slot.control]

    def joiners(self) -> list[ServerControl]:
        """Servers that are up and wait for a sync to bring them the published version."""
        return [
            slot.control
            for _, slot in sorted(self._slots.items())
            if slot.health.state is ServerState.STALE and slot.control
        ]

    async def changed(self) -> None:
        """Returns when a server has come up or gone since the last time; for one caller."""
        await self._changed.wait()
        self._changed.clear()

    async def joined(self, urls: Collection[str]) -> None:
        """A complete sync has brought these servers the published version: they enter the router."""
        for slot in self._at(urls):
            slot.note(slot.health.synced)
        if None not in self._tasks:
            self._tasks[None] = asyncio.create_task(self._router.live(), name="router")
        await self._settle()

    @contextmanager
    def syncing(self, urls: Collection[str]) -> Iterator[None]:
        """Around a sync of these servers: if one dies in it, its requests are not to blame."""
        slots = self._at(urls)
        for slot in slots:
            slot.health.sync_began()
        try:
            yield
        finally:
            for slot in slots:
                slot.health.sync_ended()

    async def disagreed(self, reasons: Mapping[str, str]) -> None:
        """These alone compute other log-probs than the trainer from the same weights: they are started again."""
        for slot in self._at(reasons):
            if slot.health.up:
                self._gray["parity"] += 1
                slot.note(slot.health.mark_dead, reasons[slot.url])
        await self._settle()

    async def sync_failed(self, reasons: Mapping[str, str]) -> None:
        """These servers leave the router, and what they were generating goes on elsewhere; each is stale until a later
        sync, or started again where it does not let go of its requests or fails sync after sync."""
        slots = self._at(reasons)
        for slot in slots:
            slot.note(slot.health.sync_failed, reasons[slot.url])
        await self._settle()
        for slot, drained in zip(
            slots, await asyncio.gather(*(slot.drain(DRAIN_SECONDS) for slot in slots)), strict=True
        ):
            if drained or not slot.health.up:
                continue
            words = await slot.last_words()
            # Its own watch may have found it dead meanwhile.
            if slot.health.up:
                reason = f"it did not let go of its requests after a failed sync. Last lines of its log:\n{words}"
                slot.note(slot.health.died, reason)

    async def watch(self) -> None:
        """Raises ServerError when nothing can be done any more: too few servers are left, or the router stays down."""
        for slot, task in self._tasks.items():
            if task.done() and not task.cancelled() and task.exception() is not None:
                error = task.exception()
                if isinstance(error, MegasyncError):
                    raise error
                raise ServerError(
                    f"the care for {'the router' if slot is None else f'server {slot.index}'} broke: {error!r}"
                ) from error
        left, least = len(self._slots), self._config.rollout.min_servers
        if left < least:
            raise ServerError(f"{left} servers are left, fewer than rollout.min_servers={least}. {self._last_gone}")

    async def resize(self, servers: int) -> str:
        """Adds or removes servers until there are so many; returns what was done, in words.

        An added server serves after the next weight sync. A removed one leaves the router first, its requests go on
        elsewhere. Raises MegasyncError when the cluster has no room or a server does not start; the others stay.
        """
        least = self._config.rollout.min_servers
        if servers < least:
            raise ServerError(f"rollout={servers} is below rollout.min_servers={least}; ask for {least} or more")
        async with self._resizing:
            before = len(self._slots)
            if servers > before:
                await self._grow(servers - before)
            else:
                await asyncio.gather(*(self._remove(slot) for slot in self._least_useful(before - servers)))
        done = "there are already" if servers == before else f"{before} ->"
        return f"{done} {servers} servers" + (
            "; the new ones serve after the next weight sync" if servers > before else ""
        )

    async def visible_devices(self, index: int) -> str:
        """The GPUs of server number `index`, for who shares them. Raises MegasyncError while it does not run."""
        return await self._slots[index].visible_devices()

    def loads(self) -> list[ServerLoad]:
        """The latest report of each server that the router sends requests to."""
        slots = [slot for slot in self._slots.values() if slot.index not in self._isolated]
        return [slot.load for slot in slots if slot.health.serves and slot.load is not None]

    def doubt(self) -> None:
        """An answer made no sense, and whose it was is not known: all servers are checked."""
        for slot in self._slots.values():
            slot.doubt()

    # One server by itself, for requests that are suspected

    async def isolate(self, avoid: Collection[int]) -> tuple[int, str] | None:
        """Slot and URL of a serving server that was taken out of the router and runs nothing any more; its requests go
        on elsewhere. One that is not in `avoid`, if there is any; None without a server."""
        serving = [slot for _, slot in sorted(self._slots.items()) if slot.health.serves]
        if not serving:
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
        """The router may send requests to the server of this slot again."""
        self._isolated.discard(slot)
        self._router.look_now()

    def excuse(self, slot: int) -> None:
        """A death of this slot's server was a request's doing."""
        if slot in self._slots:
            self._slots[slot].health.excuse()

    def metrics(self) -> dict[str, float]:
        """Servers by state, and how often servers and router were started again."""
        states = [slot.health.state for slot in self._slots.values()]
        restarts = sum(slot.starts - 1 for slot in self._slots.values())
        return {
            f"fleet/{state}": float(states.count(state)) for state in ServerState if state is not ServerState.RETIRED
        } | {
            "fleet/restarts": float(restarts),
            "fleet/router_restarts": float(self._router.starts - 1),
            "fleet/isolated": float(len(self._isolated)),
            **{f"fleet/gray_{fault}": float(self._gray[fault]) for fault in ("answers", "slow", "parity")},
        }

    # As the judge of its slots

    def reported(self, slot: int, load: ServerLoad) -> str | None:
        return self._ruled("slow", self._peers.reported(slot, load))

    def checked(self, slot: int, problem: str | None) -> str | None:
        return self._ruled("answers", self._peers.checked(slot, problem))

    def unanswered(self, slot: int) -> None:
        self._peers.unanswered(slot)

    def _ruled(self, fault: str, verdict: str | None) -> str | None:
        self._gray[fault] += verdict is not None
        return verdict

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        try:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            self._tasks.clear()
            await asyncio.gather(self._router.close(), *(slot.close() for slot in self._slots.values()))
            self._slots.clear()

    # Slots

    def _new_slot(self, index: int) -> ServerSlot:
        timeouts = self._config.timeouts
        self._slots[index] = ServerSlot(
            index,
            ServerHealth(self._policy, self._clock),
            lambda: self._server_process(index),
            self._config.rollout.health,
            timeouts.server_start,
            timeouts.shutdown,
            self._control,
            self._on_change,
            judge=self,
        )
        return self._slots[index]

    def _watch_over(self, slot: ServerSlot) -> None:
        async def live() -> None:
            await slot.live()
            # It has retired by itself, and its process has ended.
            self._pools.remove_slot("rollout", slot.index)
            del self._tasks[slot]

        self._tasks[slot] = asyncio.create_task(live(), name=f"server {slot.index}")

    def _at(self, urls: Collection[str]) -> list[ServerSlot]:
        return [slot for slot in self._slots.values() if slot.url and slot.url in urls]

    def _on_change(self, slot: ServerSlot, before: ServerState) -> None:
        state = slot.health.state
        if state.up and not before.up:
            for on_up, _ in self._followers:
                on_up(slot.control)
        elif before.up and not state.up:
            for _, on_gone in self._followers:
                on_gone(slot.url)
        if before.serves and not state.serves:
            self._isolated.discard(slot.index)
            self._peers.left(slot.index)
            for on_left in self._leavers:
                on_left(slot.index, state is ServerState.DEAD, slot.health.to_blame)
        if state is ServerState.RETIRED:
            del self._slots[slot.index]
            self._peers.retired(slot.index)
            self._last_gone = f"The last to go was server {slot.index}: {slot.health.reason}"
        self._router.look_now()
        self._changed.set()

    def _routed(self) -> list[str]:
        """URLs of those that the router is to know."""
        slots = [slot for _, slot in sorted(self._slots.items()) if slot.index not in self._isolated]
        return [slot.url for slot in slots if slot.health.serves and slot.url]

    async def _settle(self) -> None:
        if None in self._tasks and not await self._router.settle(SETTLE_SECONDS):
            log.warning(
                "the router did not take its new list of servers within %.0f s; it is asked again", SETTLE_SECONDS
            )

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
        await self._pools.add_slot("rollout", index, PLACE_SECONDS)
        slot = self._new_slot(index)
        try:
            await slot.start()
        except BaseException:
            del self._slots[index]
            self._pools.remove_slot("rollout", index)
            raise
        self._watch_over(slot)

    def _least_useful(self, count: int) -> list[ServerSlot]:
        """Those that do not serve first, then the latest."""
        ranked = sorted(self._slots.values(), key=lambda slot: (slot.health.serves, -slot.index))
        return ranked[:count]

    async def _remove(self, slot: ServerSlot) -> None:
        """Router first, then its requests, then the process."""
        slot.note(slot.health.retire, "it was scaled away")
        task = self._tasks.pop(slot, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._settle()
        await slot.drain(DRAIN_SECONDS)
        await slot.close()
        self._pools.remove_slot("rollout", slot.index)

    # Processes, and the ways to them

    def _control(self, url: str) -> ServerControl:
        return ServerControl(url, self._keys.admin)

    def _members(self, router_url: str) -> RouterMembers:
        router = ServerControl(router_url, self._keys.router, router_trust(self._config.cluster))
        return RouterMembers(router, self._keys.generation)

    def _server_process(self, index: int) -> ServerProcess:
        config = self._config
        spec = ServerSpec(
            config.model.path,
            config.rollout,
            config.model.dtype,
            self._device.kind,
            config.seed + index,
            config.rollout.deterministic,
        )
        log_path = str(self._logs / f"server-{index}.log")
        arguments = (spec, config.cluster.host, 0, log_path, self._keys.admin, self._keys.generation)
        return ActorProcess("server", arguments, self._pools, slot=index)

    def _router_process(self, servers: Collection[str], port: int) -> ServerProcess:
        config = self._config
        log_path = str(self._logs / "router.log")
        arguments = (
            list(servers),
            config.rollout.router_policy,
            config.cluster.host,
            port,
            log_path,
            config.timeouts.request,
            self._keys,
            config.cluster,
        )
        return ActorProcess("router", arguments, self._pools, guest=True)
