"""A service (a server, the router) in a Ray actor of its own, which ends with it."""

from __future__ import annotations

import logging
from typing import Any

from megasync.cluster.actors import Actors
from megasync.cluster.pools import Pools
from megasync.errors import MegasyncError

log = logging.getLogger(__name__)

# Beyond a start's own deadline: the actor's process has to come up too, and its reason is the better one to hear.
ANSWER_SECONDS = 30.0


class ActorProcess:
    """Nothing runs before `start`; not reusable after `stop`."""

    def __init__(
        self,
        role: str,
        arguments: tuple,
        pools: Pools,
        slot: int = 0,
        *,
        pool: str | None = None,
        guest: bool = False,
        beside: bool = False,
    ) -> None:
        """`pool`, `guest` and `beside` are those of `Actors.create`."""
        self._role = role
        self._arguments = arguments
        self._pools = pools
        self._slot = slot
        self._placement = {"pool": pool, "guest": guest, "beside": beside}
        self._actors: Actors | None = None

    async def start(self, timeout: float) -> str:
        self._actors = Actors.create(
            self._role, [self._arguments], pools=self._pools, first_slot=self._slot, **self._placement
        )
        return await self._call("start", timeout, timeout=timeout + ANSWER_SECONDS)

    async def alive(self) -> bool:
        return await self._call("alive", timeout=ANSWER_SECONDS)

    async def tail(self, lines: int) -> str:
        return await self._call("tail", lines, timeout=ANSWER_SECONDS)

    async def visible_devices(self) -> str:
        """See `SGLangServer.visible_devices`."""
        return await self._call("visible_devices", timeout=ANSWER_SECONDS)

    async def stop(self, timeout: float) -> None:
        """Asks the service to end, `timeout` seconds at most, and ends the actor whatever it answered.

        Also when it is cancelled: the actor's end takes the service with it.
        """
        if self._actors is None:
            return
        try:
            await self._call("stop", timeout=timeout)
        except MegasyncError as error:
            log.debug("%s %d was ended without an answer: %r", self._role, self._slot, error)
        finally:
            self._actors.kill()
            self._actors = None

    async def _call(self, method: str, *arguments: Any, timeout: float) -> Any:
        return await self._actors.call_one(0, method, *arguments, timeout=timeout)
