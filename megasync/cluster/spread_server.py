"""A server on several nodes, as one process: started and stopped whole, and ended when any of its processes has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megasync.cluster.actors import ServiceActor
from megasync.concurrency.tasks import gather_or_cancel, wait_for_first


class SpreadServer:
    """The actors of one server, one on each node; requests go to the first.

    ``part`` makes the actor of a node, from the node's number and the point where all meet (None on the first).
    """

    def __init__(self, part: Callable[[int, tuple[str, int] | None], ServiceActor], nodes: int) -> None:
        self._make_part = part
        self._nodes = nodes
        self._parts = [part(0, None)]

    async def start(self, timeout: float) -> str:
        """Starts all processes; returns the URL of the first. Raises MegasyncError; `stop` ends those that started."""
        meeting_point = await self._parts[0].meet(timeout)
        self._parts += [self._make_part(node, meeting_point) for node in range(1, self._nodes)]
        urls = await gather_or_cancel(*(part.start(timeout) for part in self._parts))
        return urls[0]

    async def ended(self) -> None:
        """Returns, or raises, when one of the processes has ended: the others cannot go on without it."""
        await wait_for_first(*(asyncio.ensure_future(part.ended()) for part in self._parts))

    def processes(self) -> list[tuple[str, int]]:
        return [process for part in self._parts for process in part.processes()]

    async def tail(self, lines: int) -> str:
        """The last lines of all logs, one after the other."""
        tails = await asyncio.gather(*(part.tail(lines) for part in self._parts), return_exceptions=True)
        return "\n".join(
            f"node {node}: {tail if isinstance(tail, str) else f'(unknown: {tail})'}" for node, tail in enumerate(tails)
        )

    async def visible_devices(self) -> str:
        """The GPUs of the first node."""
        return await self._parts[0].visible_devices()

    async def stop(self, timeout: float) -> None:
        await asyncio.gather(*(part.stop(timeout) for part in self._parts))
