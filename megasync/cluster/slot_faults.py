"""Records the faults and recoveries of server slots.

A fault is a death, a failed weight sync of a server that served, or a slot that is given up. A recovery is that the
server serves again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasync.serving.health import ServerState

if TYPE_CHECKING:
    from megasync.cluster.server_slot import ServerSlot
    from megasync.observe.events import EventSink


class SlotFaults:
    """Follows the transitions of slots; ``events`` records them."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._faulty: set[str] = set()

    def changed(self, name: str, slot: ServerSlot, before: ServerState) -> None:
        """To be called after each transition of a slot, with the name of its server in logs and events."""
        state, reason = slot.health.state, slot.health.reason
        if state is ServerState.DEAD:
            self._fault(name, f"dead: {reason}", slot)
        elif state is ServerState.STALE and before.serves and not slot.health.behind:
            self._fault(name, f"out of service until a weight sync succeeds: {reason}", slot)
        elif state is ServerState.RETIRED and before is ServerState.DEAD:
            self._fault(name, f"not restarted: {reason}", slot)
            self._faulty.discard(name)
        elif state.serves and not before.serves and name in self._faulty:
            self._faulty.discard(name)
            self._events.recovery(name, f"serves at {slot.url}", starts=slot.starts)

    def _fault(self, name: str, text: str, slot: ServerSlot) -> None:
        self._faulty.add(name)
        self._events.fault(name, text, url=slot.url)
