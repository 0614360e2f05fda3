"""The devices that trainer ranks and servers share (`cluster.colocate`): the ranks train, or the servers generate.

    phase      on the devices                                   what may happen
    ---------  -----------------------------------------------  -------------------------------------------------------
    ranks      the ranks whole; servers without their memory    a step, the copy for a checkpoint, a start of ranks
    servers    the servers, and the weights of the ranks        requests, weight syncs, evaluations, a start of servers

Whoever needs the devices asks for them; asking again changes nothing. The other side leaves the devices first, so both
are never on them whole, whatever dies in between. A server that dies while the ranks hold the devices starts again when
the servers do; ranks that die start again when they hold them. Without `cluster.colocate` no method has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.cluster.fleet import Fleet
    from megasync.control.interfaces import Observer, Trainer
    from megasync.control.watchdog import Watchdog


class Colocation:
    """Who holds the devices; at first the servers. `enabled` is `cluster.colocate`."""

    def __init__(
        self,
        enabled: bool,
        trainer: Trainer,
        fleet: Fleet,
        observer: Observer,
        watchdog: Watchdog,
        clock: Callable[[], float],
    ) -> None:
        self.enabled = enabled
        self._trainer = trainer
        self._fleet = fleet
        self._observer = observer
        self._watchdog = watchdog
        self._clock = clock
        self._seconds = 0.0
        self._servers_left = False
        self._ranks_left = True

    async def to_ranks(self) -> None:
        """Hands the devices to the ranks. Raises RankLost and ServerError."""
        if not self.enabled:
            return
        await self._take_from_servers()
        if self._ranks_left:
            with self._handing_over():
                await self._trainer.restore()
            self._ranks_left = False

    async def to_new_ranks(self) -> None:
        """Hands the devices to ranks that are about to be started, whole. Raises ServerError."""
        if self.enabled:
            await self._take_from_servers()
            self._ranks_left = False

    async def to_servers(self) -> None:
        """Hands the devices to the servers. Raises RankLost."""
        if not self.enabled:
            return
        if not self._ranks_left:
            self._observer.activity("trainer", "leaving the devices to the servers")
            with self._handing_over():
                await self._trainer.offload()
            self._ranks_left = True
        if self._servers_left:
            with self._handing_over():
                await self._fleet.resume_memory()
            self._servers_left = False

    async def _take_from_servers(self) -> None:
        if not self._servers_left:
            self._observer.activity("trainer", "taking the devices from the servers")
            with self._handing_over():
                await self._fleet.release_memory()
            self._servers_left = True

    def metrics(self) -> dict[str, float]:
        """The seconds that hand-overs took since the last call; nothing without `cluster.colocate`."""
        seconds, self._seconds = self._seconds, 0.0
        return {"time/turns": seconds} if self.enabled else {}

    @contextmanager
    def _handing_over(self) -> Generator[None]:
        start = self._clock()
        try:
            with self._watchdog.bounded():
                yield
        finally:
            self._seconds += self._clock() - start
