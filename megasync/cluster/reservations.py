"""Servers of the fleet that the router leaves out although they serve, and what they are reserved for.

    reserved by  for                                            requests                 weight syncs
    -----------  ---------------------------------------------  -----------------------  ------------
    `isolate`    prompts that are suspected of killing servers  those of the trial       as usual
    `pin`        an evaluation of one version                   those of the evaluation  left out

Both take a server out of the router and abort its requests, which continue elsewhere. A reservation ends by `release`
or `unpin`, and when the server stops serving. An unpinned server serves again if nothing newer was published, and is a
joiner otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from megasync.cluster.router_slot import RouterSlot
from megasync.cluster.server_slot import ServerSlot
from megasync.cluster.slots import Slots
from megasync.serving.control import ServerControl
from megasync.serving.health import ServerState


@dataclass(frozen=True, slots=True)
class _Pin:
    """The version that a server is kept at. `over` is set once it no longer is."""

    version: int
    over: asyncio.Event


class Reservations:
    """Reserves servers. `newest_version` is the newest that any server may hold, or None where it is unknown."""

    def __init__(self, slots: Slots, router: RouterSlot, newest_version: Callable[[], int | None]) -> None:
        self._slots = slots
        self._router = router
        self._newest_version = newest_version
        self._isolated = set[int]()
        self._pins: dict[int, _Pin] = {}

    def published(self) -> list[ServerSlot]:
        """The slots that serve the published version, in order: all that serve and are not pinned."""
        return [slot for slot in self._slots if slot.health.serves and slot.index not in self._pins]

    def routed(self) -> list[ServerSlot]:
        """The slots that the router should list, in order."""
        return [slot for slot in self.published() if slot.index not in self._isolated]

    def ended(self, slot: ServerSlot) -> None:
        """Ends the reservations of a slot, which no longer serves."""
        self._isolated.discard(slot.index)
        self._end_pin(slot)

    def metrics(self) -> dict[str, float]:
        return {"fleet/isolated": float(len(self._isolated)), "fleet/pinned": float(len(self._pins))}

    # For suspected prompts: `rollout.quarantine.TrialServers`

    async def isolate(self, avoid: Collection[int]) -> tuple[int, str] | None:
        """Isolates a serving server, if possible one whose slot is not in `avoid`.

        Returns its slot and URL once its requests have ended, or None when no server could be isolated.
        """
        if not (serving := self.published()):
            return None
        slot = min(serving, key=lambda slot: slot.index in avoid)
        url = slot.url
        self._isolated.add(slot.index)
        await self._router.settle()
        drained = await slot.drain()
        if drained and slot.health.serves and slot.url == url:
            return slot.index, url
        self.release(slot.index)
        return None

    def release(self, slot: int) -> None:
        """Ends the isolation of a slot: the router may send requests to it again."""
        self._isolated.discard(slot)
        self._router.refresh()

    def refund_restart(self, slot: int) -> None:
        """A request caused a death of this slot's server, so the slot is not charged with a restart."""
        if slot in self._slots:
            self._slots[slot].health.refund_restart()

    # For an evaluation: `control.pinning`

    async def pin(self, count: int, version: int) -> list[str]:
        """Pins up to `count` servers to `version`, the published one; returns their URLs, none if none can be spared.

        Prefers those with the fewest requests; another server always stays in the router. Whatever syncs begin after
        this call leave them out: it marks them before it first waits.
        """

        def burden(slot: ServerSlot) -> tuple[bool, int, int]:
            requests = 0 if slot.load is None else slot.load.running + slot.load.waiting
            return slot.health.state is ServerState.SUSPECT, requests, -slot.index

        routed = self.routed()
        chosen = {slot: slot.url for slot in sorted(routed, key=burden)[: max(0, min(count, len(routed) - 1))]}
        for slot in chosen:
            self._pins[slot.index] = _Pin(version, asyncio.Event())
        if not chosen:
            return []
        try:
            alone = await self._router.settle()
            drained = await asyncio.gather(*(slot.drain() for slot in chosen))
        except BaseException:
            self.unpin(chosen.values())
            raise
        self.unpin(url for url, done in zip(chosen.values(), drained, strict=True) if not (alone and done))
        return [url for slot, url in chosen.items() if slot.index in self._pins and slot.url == url]

    def unpin(self, urls: Iterable[str]) -> None:
        """Lets pinned servers serve again: at once if nothing newer can be on any server, else after a sync."""
        for slot in self._slots.at(urls):
            pin = self._end_pin(slot)
            if pin is not None and (newest := self._newest_version()) != pin.version:
                reason = f"it was kept at version {pin.version} for an evaluation; the newest is {newest}"
                slot.note(slot.health.missed_sync, reason)
        self._router.refresh()

    def pinned(self) -> list[ServerControl]:
        """The servers that are pinned, in slot order."""
        return [slot.control for slot in self._slots if slot.index in self._pins and slot.control]

    async def unpinned(self, url: str) -> None:
        """Returns once the server at this URL is not pinned: it has died, or `unpin` was called."""
        for slot in self._slots.at([url]):
            if (pin := self._pins.get(slot.index)) is not None:
                await pin.over.wait()

    def pinned_version(self, slot: ServerSlot) -> int | None:
        """The version that a slot is pinned to; None if it is not."""
        pin = self._pins.get(slot.index)
        return None if pin is None else pin.version

    def _end_pin(self, slot: ServerSlot) -> _Pin | None:
        if (pin := self._pins.pop(slot.index, None)) is not None:
            pin.over.set()
        return pin
