"""Server slots that are supervised together: those of the rollout pool, or those of one frozen model.

A fault is a death, a failed weight sync of a server that served, or a slot that is given up. A recovery is that the
server serves again. Both are recorded as events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from megasync.cluster.gray_failures import GrayFailures
from megasync.cluster.server_slot import ServerProcess, ServerSlot, raise_supervision_error
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config import Config
from megasync.observe.context import RunContext
from megasync.observe.hang import RunProcess
from megasync.serving.control import ServerControl
from megasync.serving.health import ServerState


class Slots:
    """The slots by number, in ascending order; one that is retired is no longer among them.

    Args:
        name: of a slot's server in logs and events.
        on_change: called after each transition, with the slot and the previous state.
        on_end: called with the number of a retired slot once its process has ended.
    """

    def __init__(
        self,
        config: Config,
        context: RunContext,
        name: Callable[[int], str],
        on_change: Callable[[ServerSlot, ServerState], None],
        on_end: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._config = config
        self._context = context
        self._name = name
        self._on_change = on_change
        self._on_end = on_end
        self._slots: dict[int, ServerSlot] = {}
        self._tasks: dict[ServerSlot, asyncio.Task[None]] = {}
        self._faulty = set[ServerSlot]()
        # Starts of servers that took the place of another one.
        self.restarts = 0
        # Names the last slot that was given up, and why; empty while none was.
        self.last_lost = ""

    def __iter__(self) -> Iterator[ServerSlot]:
        # Also read by other threads.
        return iter([slot for _, slot in sorted(self._slots.copy().items())])

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    def __getitem__(self, number: int) -> ServerSlot:
        return self._slots[number]

    def at(self, urls: Iterable[str]) -> list[ServerSlot]:
        """The slots whose servers are up at these URLs."""
        slots = {slot.url: slot for slot in self if slot.health.up}
        return [slots[url] for url in urls if url in slots]

    def add(
        self,
        number: int,
        make_process: Callable[[], ServerProcess],
        make_control: Callable[[str, ServerProcess], ServerControl],
        peers: GrayFailures | None = None,
        may_start: asyncio.Event | None = None,
    ) -> ServerSlot:
        """A new slot, which nobody has started; the arguments are those of `ServerSlot`."""
        identity = self._config, self._context, number, self._name(number)
        slot = ServerSlot(*identity, make_process, make_control, self._changed, peers, may_start)
        self._slots[number] = slot
        return slot

    def supervise(self, slot: ServerSlot) -> None:
        """Restarts the started server of a slot whenever it dies, in the background."""

        async def run() -> None:
            await slot.run()
            self._on_end(slot.index)
            del self._tasks[slot]

        self._tasks[slot] = asyncio.create_task(run(), name=slot.name)

    async def end_supervision(self, slot: ServerSlot) -> None:
        """Leaves a slot to the caller, as it is."""
        if (task := self._tasks.pop(slot, None)) is not None:
            await cancel_and_wait(task)

    def discard(self, slot: ServerSlot) -> None:
        """Removes a slot that nobody supervises."""
        self._slots.pop(slot.index, None)

    def watch(self) -> None:
        """Raises the error of a supervision that failed."""
        raise_supervision_error(self._tasks.values())

    def processes(self) -> list[RunProcess]:
        """The running processes of all servers."""
        return [process for slot in self for process in slot.processes()]

    async def stop(self) -> None:
        """Ends all servers, and forgets them."""
        slots = dict.fromkeys((*self._slots.values(), *self._tasks))
        try:
            await cancel_and_wait(*self._tasks.values())
        finally:
            self._tasks.clear()
            self._slots.clear()
            await asyncio.gather(*(slot.close() for slot in slots))

    def _changed(self, slot: ServerSlot, before: ServerState) -> None:
        state, reason = slot.health.state, slot.health.reason
        if state is ServerState.DEAD:
            self._fault(slot, f"dead: {reason}")
        elif state is ServerState.STALE and before.serves and not slot.health.behind:
            self._fault(slot, f"out of service until a weight sync succeeds: {reason}")
        elif state is ServerState.RETIRED and before is ServerState.DEAD:
            self._fault(slot, f"not restarted: {reason}")
        elif state.serves and not before.serves and slot in self._faulty:
            self._faulty.discard(slot)
            self._context.events.recovery(slot.name, f"serves at {slot.url}", starts=slot.starts)
        self.restarts += state is ServerState.RESTARTING
        self._on_change(slot, before)
        if state is ServerState.RETIRED:
            self._faulty.discard(slot)
            self.discard(slot)
            self.last_lost = f"The last server lost was {slot.index}: {reason}"

    def _fault(self, slot: ServerSlot, text: str) -> None:
        self._faulty.add(slot)
        self._context.events.fault(slot.name, text, url=slot.url)
