"""One server in a publish, whatever moves the weights: stopped, asked for its version, and set free again."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from megasync.errors import HttpStatusError, ServerError, SyncError
from megasync.sync.attempt import Attempt

if TYPE_CHECKING:
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# For each step of the clean-up after a failure.
RECOVERY_SECONDS = 10.0
# A batch that was running when the server was paused may still be ending; a flush is refused until then.
FLUSH_SECONDS = 5.0
FLUSH_POLL_SECONDS = 0.02


class Served:
    """A server, by its control; ``seconds`` is the deadline of each call."""

    def __init__(self, server: ServerControl, pause_mode: str, seconds: float) -> None:
        self.server = server
        self._pause_mode = pause_mode
        self._seconds = seconds

    @property
    def url(self) -> str:
        return self.server.url

    async def pause(self, attempt: Attempt) -> None:
        """Stops generation."""
        standing = attempt.standing[self.url]
        standing.paused, standing.since = True, time.monotonic()
        await self._post("/pause_generation", {"mode": self._pause_mode})

    async def flush(self) -> None:
        """Drops the old weights' prefix cache. `in_place` keeps running requests' cache, so it cannot be flushed."""
        if self._pause_mode != "in_place":
            await flush_cache(self.server, self._seconds)

    async def go_on(self, attempt: Attempt) -> None:
        """Generates again, under the new version."""
        standing = attempt.standing[self.url]
        await self._post("/continue_generation", {"torch_empty_cache": False})
        standing.paused, standing.moved = False, True
        attempt.note("pause", time.monotonic() - standing.since)

    async def verify(self, attempt: Attempt) -> None:
        found = await self.server.weight_version(self._seconds)
        if found != attempt.version:
            raise SyncError(f"it reports version {found} instead of {attempt.version}")

    async def release(self, attempt: Attempt, quarantined: bool) -> str:
        """Lets the server generate again if it holds one version as a whole; otherwise why it stays paused.

        Args:
            quarantined: it was paused for such a reason before this attempt, which did not bring it a whole version.
        """
        standing = attempt.standing[self.url]
        if not standing.paused:
            return ""
        if standing.begun:
            try:
                await self._post("/end_weight_update", seconds=RECOVERY_SECONDS)
            except ServerError as error:
                log.debug("no weight update to end: %s", error)
        if standing.in_doubt:
            return f"it may hold parts of version {attempt.version}"
        if quarantined:
            return ""
        try:
            await self._post("/continue_generation", {"torch_empty_cache": False}, RECOVERY_SECONDS)
        except ServerError as error:
            return f"it could not be told to go on: {error}"
        return ""

    async def _post(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Any:
        return await self.server.post(path, body or {}, timeout=seconds or self._seconds)


async def begin_update(server: ServerControl, seconds: float) -> None:
    """Opens a weight update. One that is open already was left by a driver that is gone, and is closed. Raises ServerError."""
    try:
        await server.post("/begin_weight_update", {}, timeout=seconds)
    except HttpStatusError as error:
        log.warning("%s may have been left inside a weight update, which is closed now: %s", server.url, error)
        await server.post("/end_weight_update", {}, timeout=seconds)
        await server.post("/begin_weight_update", {}, timeout=seconds)


async def flush_cache(server: ServerControl, seconds: float) -> None:
    """Drops a paused server's prefix cache, as soon as its last batch has ended. Raises ServerError."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while True:
        try:
            return await server.post("/flush_cache", {}, timeout=seconds)
        except ServerError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(FLUSH_POLL_SECONDS)
