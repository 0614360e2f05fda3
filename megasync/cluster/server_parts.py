"""The actors of one server as one process: stopped whole, and ended when any of them has."""

from __future__ import annotations

import asyncio

from megasync.cluster.actors import ServiceActor
from megasync.concurrency.tasks import wait_for_first


class ServerParts:
    """The common part of servers of several actors; `named` lists the actors, the first one for requests or control.

    Subclasses start them.
    """

    def named(self) -> list[tuple[str, ServiceActor]]:
        """The actors that exist, with the names of their logs."""
        raise NotImplementedError

    async def ended(self) -> None:
        """Returns, or raises, when one of the processes has ended: the others cannot go on without it."""
        await wait_for_first(*(asyncio.ensure_future(part.ended()) for _, part in self.named()))

    def processes(self) -> list[tuple[str, int]]:
        return [process for _, part in self.named() for process in part.processes()]

    async def tail(self, lines: int) -> str:
        """The last lines of all logs, one after the other."""
        named = self.named()
        tails = await asyncio.gather(*(part.tail(lines) for _, part in named), return_exceptions=True)
        return "\n".join(
            f"{name}: {tail if isinstance(tail, str) else f'(unknown: {tail})'}"
            for (name, _), tail in zip(named, tails, strict=True)
        )

    async def visible_devices(self) -> str:
        """The GPUs of the first process."""
        return await self.named()[0][1].visible_devices()

    async def stop(self, timeout: float) -> None:
        await asyncio.gather(*(part.stop(timeout) for _, part in self.named()))
