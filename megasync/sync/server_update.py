"""One server during a publish, whichever transport moves the weights: paused, verified, resumed or kept paused."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.errors import EngineErrors, HttpStatusError, ServerError, SyncError
from megasync.observe import trace
from megasync.sync.attempt import Attempt, PhaseFailed

if TYPE_CHECKING:
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# For each step of the clean-up after a failure.
RECOVERY_SECONDS = 10.0
# A batch that was running at the pause may still be finishing; SGLang refuses a flush until then.
FLUSH_SECONDS = 5.0
FLUSH_POLL_SECONDS = 0.02


class ServerUpdate:
    """The calls that every transport makes to a server; ``seconds`` is the deadline of each. All raise ServerError."""

    def __init__(self, server: ServerControl, pause_mode: str, seconds: float) -> None:
        self.server = server
        self._pause_mode = pause_mode
        self._seconds = seconds

    @property
    def url(self) -> str:
        return self.server.url

    async def pause(self, attempt: Attempt) -> None:
        """Stops generation."""
        progress = attempt.progress[self.url]
        progress.paused, progress.paused_at = True, time.monotonic()
        await self.post("/pause_generation", {"mode": self._pause_mode})

    async def flush(self) -> None:
        """Drops the old weights' prefix cache as soon as the last batch has ended.

        `in_place` keeps running requests' cache, so it cannot be flushed.
        """
        if self._pause_mode == "in_place":
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                await self.post("/flush_cache")
                return
            except ServerError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(FLUSH_POLL_SECONDS)

    async def begin(self, attempt: Attempt) -> None:
        """Opens a weight update. If an earlier driver left one open, that one is closed first."""
        attempt.progress[self.url].update_open = True
        try:
            await self.post("/begin_weight_update")
        except ServerError as error:
            # An engine without an error has just opened one.
            if not all(each is None or isinstance(each, HttpStatusError) for each in each_engine(error)):
                raise
            log.warning("%s refused a weight update; closing one that may still be open: %s", self.url, error)
            await self.post("/end_weight_update")
            await self.post("/begin_weight_update")

    async def end(self, attempt: Attempt) -> None:
        await self.post("/end_weight_update")
        attempt.progress[self.url].update_open = False

    async def resume(self, attempt: Attempt) -> None:
        """Generates again, under the new version."""
        progress = attempt.progress[self.url]
        await self.post("/continue_generation", {"torch_empty_cache": False})
        progress.paused, progress.moved = False, True
        seconds = time.monotonic() - progress.paused_at
        attempt.note("pause", seconds)
        trace.complete(*("sync", "pause", time.time() - seconds, time.time()), server=self.url, version=attempt.version)

    async def verify(self, attempt: Attempt) -> None:
        """Raises SyncError unless the server reports the attempt's version."""
        version = await self.server.weight_version(self._seconds)
        if version != attempt.version:
            raise SyncError(f"it reports version {version} instead of {attempt.version}")

    async def release(self, attempt: Attempt, quarantined: bool) -> str:
        """Resumes generation if the server holds one complete version; otherwise returns why it stays paused.

        A server that an earlier attempt ``quarantined`` stays paused, because this one brought it no complete version.
        """
        progress = attempt.progress[self.url]
        if not progress.paused:
            return ""
        if progress.update_open and not progress.stuck:
            try:
                await self.post("/end_weight_update", seconds=RECOVERY_SECONDS)
            except ServerError as error:
                log.debug("%s has no weight update to close: %s", self.url, error)
        if progress.mixed:
            return progress.quarantine_reason(attempt.version)
        if quarantined:
            return ""
        try:
            await self.post("/continue_generation", {"torch_empty_cache": False}, RECOVERY_SECONDS)
        except ServerError as error:
            return f"it could not be resumed: {error}"
        return ""

    async def post(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Any:
        """The server's answer to a POST within ``seconds`` (default: this update's deadline)."""
        return await self.server.post(path, body or {}, timeout=seconds or self._seconds)


def each_engine(error: ServerError) -> tuple[ServerError | None, ...]:
    """The error of each engine of a server, None for one that succeeded."""
    return error.errors if isinstance(error, EngineErrors) else (error,)


def untouched(error: ServerError, mark: str) -> bool:
    """Whether a failed load has written nothing: the answer of each engine has ``mark`` in it."""
    return all(each is not None and mark in str(each) for each in each_engine(error))


S = TypeVar("S", bound=ServerUpdate)


async def failures(servers: Sequence[S], call: Callable[[S], Awaitable[Any]]) -> dict[str, BaseException]:
    """Calls every server concurrently and waits for all answers. Returns the exceptions by server URL."""
    answers = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
    return {s.url: a for s, a in zip(servers, answers, strict=True) if isinstance(a, BaseException)}


async def call_each(servers: Sequence[S], call: Callable[[S], Awaitable[Any]]) -> None:
    """Calls each server as `failures` does, and raises PhaseFailed if there are any failures."""
    if causes := await failures(servers, call):
        raise PhaseFailed(causes)
