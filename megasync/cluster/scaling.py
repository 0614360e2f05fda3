"""Changes of the number of servers while a run goes on, one change at a time.

An added server serves after the next weight sync. A removed one leaves the router first, then its requests are aborted
and continue elsewhere, then its process ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.reservations import Reservations
from megasync.cluster.router_slot import RouterSlot
from megasync.cluster.server_slot import ServerSlot
from megasync.cluster.slots import Slots
from megasync.config.pools import server_devices
from megasync.config.schema import RolloutConfig
from megasync.errors import MegasyncError, ServerError


class Scaling:
    """Adds and removes servers of a fleet. `new_slot(number)` makes a slot, not started."""

    def __init__(
        self,
        config: RolloutConfig,
        processes: FleetProcesses,
        slots: Slots,
        router: RouterSlot,
        reservations: Reservations,
        new_slot: Callable[[int], ServerSlot],
    ) -> None:
        self._config = config
        self._processes = processes
        self._slots = slots
        self._router = router
        self._reservations = reservations
        self._new_slot = new_slot
        self._changing = asyncio.Lock()

    async def resize(self, servers: int) -> str:
        """Adds or removes servers up to this number; returns a description of the change.

        Raises MegasyncError when the cluster has no room or a server does not start; the others stay.
        """
        least = self._config.min_servers
        if self._config.external:
            raise ServerError("the servers of this run are those of rollout.external; a running run cannot change them")
        width = server_devices(self._config)
        if (room := self._processes.shared_devices) is not None and servers * width > room:
            raise ServerError(
                f"rollout={servers}: the devices of the trainer ranks (cluster.colocate) have room for {room // width}"
            )
        if servers < least:
            raise ServerError(f"rollout={servers} is below rollout.min_servers={least}; ask for {least} or more")
        async with self._changing:
            before = len(self._slots)
            if servers > before:
                await self._grow(servers - before)
            else:
                await asyncio.gather(*(self._remove(slot) for slot in self._least_useful(before - servers)))
        if servers == before:
            return f"there are already {servers} servers"
        note = "; the new ones serve after the next weight sync" if servers > before else ""
        return f"{before} -> {servers} servers{note}"

    async def _grow(self, count: int) -> None:
        free = (number for number in range(len(self._slots) + count + 1) if number not in self._slots)
        results = await asyncio.gather(*(self._add(next(free)) for _ in range(count)), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, MegasyncError):
                raise error
        if errors:
            raise ServerError(f"{count - len(errors)} of {count} servers were added; {errors[0]}")

    async def _add(self, number: int) -> None:
        await self._processes.place(number)
        slot = self._new_slot(number)
        try:
            await slot.start()
        except BaseException:
            self._slots.discard(slot)
            self._processes.release(number)
            raise
        self._slots.supervise(slot)

    def _least_useful(self, count: int) -> list[ServerSlot]:
        """Servers to remove: those that do not serve first, then the latest, pinned ones last."""

        def use(slot: ServerSlot) -> tuple[bool, bool, int]:
            return slot.health.serves, self._reservations.pinned_version(slot) is not None, -slot.index

        return sorted(self._slots, key=use)[:count]

    async def _remove(self, slot: ServerSlot) -> None:
        slot.note(slot.health.retire, "removed by a resize")
        await self._slots.end_supervision(slot)
        await self._router.settle()
        await slot.drain()
        await slot.close()
        self._processes.release(slot.index)
