"""Warm pools: sandboxes that are started before anybody asks for them.

Invariant: a sandbox is handed out once and never comes back, so no user finds what another has left. At most `size` are
warm; `close` stops them and whatever is still starting.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from megasync.concurrency.tasks import cancel_and_wait
from megasync.sandboxes.protocol import Sandbox, Snapshot, Starter

log = logging.getLogger(__name__)


class WarmPool:
    """A starter with up to `size` sandboxes of another that are ready. It fills itself from the first start on."""

    def __init__(self, starter: Starter, size: int) -> None:
        self._starter = starter
        self._size = size
        self._warm: deque[Sandbox] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def warm(self) -> int:
        """The number of sandboxes that are ready."""
        return len(self._warm)

    async def start(self, snapshot: Snapshot | None = None) -> Sandbox:
        """A warm sandbox, or a new one if none is warm, or if it begins with a snapshot."""
        sandbox = self._warm.popleft() if self._warm and snapshot is None else None
        self._refill()
        return sandbox or await self._starter.start(snapshot)

    async def fill(self) -> None:
        """Waits until the pool is full. Raises what a start does."""
        self._refill()
        if self._filling is not None:
            await asyncio.shield(self._filling)

    async def close(self) -> None:
        self._closed = True
        if self._filling is not None:
            await cancel_and_wait(self._filling)
        warm, self._warm = [*self._warm], deque()
        await asyncio.gather(*(sandbox.stop() for sandbox in warm))
        await self._starter.close()

    def _refill(self) -> None:
        if not self._closed and len(self._warm) < self._size and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())
            self._filling.add_done_callback(_report)

    async def _fill(self) -> None:
        while len(self._warm) < self._size:
            self._warm.append(await self._starter.start())


def _report(filling: asyncio.Task[None]) -> None:
    """A failed start is the error of whoever starts next; here it is only logged."""
    if not filling.cancelled() and (error := filling.exception()) is not None:
        log.warning("A warm sandbox could not be started: %s", error)
