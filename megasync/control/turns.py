"""Turns on devices that trainer ranks and servers share (`cluster.colocate`): the ranks train, or the servers generate.

    turn       on the devices                                   what may happen
    ---------  -----------------------------------------------  -------------------------------------------------------
    ranks      the ranks whole; servers without their memory    a step, the copy for a checkpoint, a start of ranks
    servers    the servers, and the weights of the ranks        requests, weight syncs, evaluations, a start of servers

Whoever needs a turn asks for it; asking again changes nothing. Those who had the devices leave them first, so never are
both on them whole, whatever dies in between. A server that dies in a turn of the ranks starts again in the next one of
the servers; ranks that die start again in a turn of theirs. Without `cluster.colocate` no method has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.control.interfaces import Observer, ServerFleet, Trainer
    from megasync.control.watchdog import Watchdog


class Turns:
    """Who has the devices; at first the servers. `taken` is whether there are turns (`cluster.colocate`)."""

    def __init__(
        self,
        taken: bool,
        trainer: Trainer,
        fleet: ServerFleet,
        observer: Observer,
        watchdog: Watchdog,
        clock: Callable[[], float],
    ) -> None:
        self.taken = taken
        self._trainer = trainer
        self._fleet = fleet
        self._observer = observer
        self._watchdog = watchdog
        self._clock = clock
        self._seconds = 0.0
        self._servers_left = False
        self._ranks_left = True

    async def of_ranks(self) -> None:
        """Makes it the turn of the ranks. Raises RankLost and ServerError."""
        if not self.taken:
            return
        await self._take_from_servers()
        if self._ranks_left:
            with self._changing():
                await self._trainer.restore()
            self._ranks_left = False

    async def of_new_ranks(self) -> None:
        """Makes it the turn of ranks that are about to be started, whole. Raises ServerError."""
        if self.taken:
            await self._take_from_servers()
            self._ranks_left = False

    async def of_servers(self) -> None:
        """Makes it the turn of the servers. Raises RankLost."""
        if not self.taken:
            return
        if not self._ranks_left:
            self._observer.activity("trainer", "leaving the devices to the servers")
            with self._changing():
                await self._trainer.offload()
            self._ranks_left = True
        if self._servers_left:
            with self._changing():
                await self._fleet.resume_memory()
            self._servers_left = False

    async def _take_from_servers(self) -> None:
        if not self._servers_left:
            self._observer.activity("trainer", "taking the devices from the servers")
            with self._changing():
                await self._fleet.release_memory()
            self._servers_left = True

    def metrics(self) -> dict[str, float]:
        """Seconds that changes of turns have taken since the last call; nothing without turns."""
        seconds, self._seconds = self._seconds, 0.0
        return {"time/turns": seconds} if self.taken else {}

    @contextmanager
    def _changing(self) -> Generator[None]:
        start = self._clock()
        try:
            with self._watchdog.bounded():
                yield
        finally:
            self._seconds += self._clock() - start
