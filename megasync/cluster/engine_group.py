"""A server of prefill and decode engines, each of which is an actor.

Requests go to the decode engine or, if there are several, to a router in front of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megasync.cluster.actors import ServiceActor
from megasync.cluster.server_parts import ServerParts
from megasync.concurrency.tasks import gather_or_cancel


class EngineGroup(ServerParts):
    """The actors of one server: its engines and, once those run, their router.

    `prefill` and `decode`, the URLs of the engines, are known once it has started.

    Args:
        front: makes the router's actor from the URLs of the decode engines.
    """

    def __init__(
        self,
        prefill: Sequence[ServiceActor],
        decode: Sequence[ServiceActor],
        front: Callable[[Sequence[str]], ServiceActor],
    ) -> None:
        self.prefill: Sequence[str] = ()
        self.decode: Sequence[str] = ()
        self._prefill, self._decode = list(prefill), list(decode)
        self._make_front = front
        self._front: ServiceActor | None = None

    def named(self) -> list[tuple[str, ServiceActor]]:
        engines = [("prefill", part) for part in self._prefill] + [("decode", part) for part in self._decode]
        return engines if self._front is None else [*engines, ("router", self._front)]

    async def start(self, timeout: float) -> str:
        """Starts all parts; returns the URL for requests. Raises MegasyncError; `stop` ends those that started."""
        deadline = asyncio.get_running_loop().time() + timeout
        urls = await gather_or_cancel(*(engine.start(timeout) for engine in (*self._prefill, *self._decode)))
        ports = await gather_or_cancel(*(engine.handover_port() for engine in self._prefill))
        self.prefill, self.decode = urls[: len(self._prefill)], urls[len(self._prefill) :]
        known = list(zip(self.prefill, ports, strict=True))
        await gather_or_cancel(*(engine.know_prefill(known) for engine in self._decode))
        if len(self.decode) == 1:
            return self.decode[0]
        self._front = self._make_front(self.decode)
        return await self._front.start(max(1.0, deadline - asyncio.get_running_loop().time()))
