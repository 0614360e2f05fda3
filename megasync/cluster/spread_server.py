"""A server on several nodes, with an actor on each."""

from __future__ import annotations

from collections.abc import Callable

from megasync.cluster.actors import ServiceActor
from megasync.cluster.server_parts import ServerParts
from megasync.concurrency.tasks import gather_or_cancel


class SpreadServer(ServerParts):
    """The actors of one server, one on each node; requests go to the first.

    ``part`` makes the actor of a node, from the node's number and the point where all meet (None on the first).
    """

    def __init__(self, part: Callable[[int, tuple[str, int] | None], ServiceActor], nodes: int) -> None:
        self._make_part = part
        self._nodes = nodes
        self._parts = [part(0, None)]

    def named(self) -> list[tuple[str, ServiceActor]]:
        return [(f"node {node}", part) for node, part in enumerate(self._parts)]

    async def start(self, timeout: float) -> str:
        """Starts all processes; returns the URL of the first. Raises MegasyncError; `stop` ends those that started."""
        meeting_point = await self._parts[0].meet(timeout)
        self._parts += [self._make_part(node, meeting_point) for node in range(1, self._nodes)]
        urls = await gather_or_cancel(*(part.start(timeout) for part in self._parts))
        return urls[0]
