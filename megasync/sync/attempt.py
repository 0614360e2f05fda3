"""One publish in progress: each server is paused, verified, resumed or kept paused, whichever transport moves weights.

`ServerProgress.mixed` is what safety rests on: it is set before a server is asked to load anything, and cleared only
when the server reports that it loaded everything or that nothing arrived. So a server in an unknown state counts as
mixed. `Attempt.error` says how far each server got and what failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.errors import EngineErrors, HttpStatusError, ServerError, SyncError
from megasync.observe import trace

if TYPE_CHECKING:
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# For each step of the clean-up after a failure.
RECOVERY_SECONDS = 10.0
# A batch that was running at the pause may still be finishing; SGLang refuses a flush until then.
FLUSH_SECONDS = 5.0
FLUSH_POLL_SECONDS = 0.02
# How SGLang's answer begins when a bucket did not arrive. It has not touched the model then.
NOT_RECEIVED = "Failed to receive weights"


@dataclass(frozen=True)
class SyncReport:
    """A published version: the URLs of the servers that hold it, bytes received by all their ranks, seconds by phase.

    ``pack`` and ``wire`` are the slowest sender's own times inside ``transfer``; they overlap.
    """

    version: int
    servers: tuple[str, ...]
    bytes: int
    seconds: Mapping[str, float]


class PublishError(SyncError):
    """A version that was not published.

    Attributes:
        failed: servers that failed or did not answer afterwards; empty when only the trainer failed.
        moved: servers that hold the new version and generate from it.
        quarantined: each server left paused, with the reason.
    """

    def __init__(
        self,
        message: str,
        version: int,
        phase: str,
        quarantined: Mapping[str, str],
        failed: Iterable[str] = (),
        moved: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.version = version
        self.phase = phase
        self.quarantined = dict(quarantined)
        self.failed = tuple(failed)
        self.moved = tuple(moved)


class PhaseFailed(Exception):
    """The failures of one phase, by server URL or "trainer"."""

    def __init__(self, causes: Mapping[str, BaseException]) -> None:
        super().__init__("; ".join(f"{who}: {str(cause) or type(cause).__name__}" for who, cause in causes.items()))
        self.causes = dict(causes)


@dataclass
class ServerProgress:
    """The progress of one publish on one server."""

    # How many buckets the server is asked to load; 0 for transports that load a version in one call.
    buckets: int = 0
    paused: bool = False
    # Clock reading at the pause.
    paused_at: float = 0.0
    # A weight update was opened and not closed.
    update_open: bool = False
    # Buckets that the server has loaded.
    loaded: int = 0
    # A load was requested, and the server has reported neither success nor that nothing arrived.
    in_doubt: bool = False
    # The server is blocked in a collective and answers nothing else.
    stuck: bool = False
    # It holds the complete new version, and generates from it unless it stays paused.
    moved: bool = False
    # It did not answer during the clean-up.
    lost: bool = False

    @property
    def mixed(self) -> bool:
        """True when the server may hold anything but the complete previous version."""
        return self.loaded > 0 or self.in_doubt

    def quarantine_reason(self, version: int) -> str:
        """Why a `mixed` server stays paused."""
        if not self.buckets:
            return f"it may hold parts of version {version}"
        text = f"it loaded {self.loaded} of {self.buckets} buckets of version {version}"
        if self.in_doubt:
            text += ", and the next one is in doubt"
        if self.stuck:
            text += "; it is stuck waiting for a trainer that is gone: restart it"
        return text


@contextmanager
def timed(seconds: dict[str, float], activity: str) -> Iterator[None]:
    """Adds the time spent inside to ``seconds[activity]``."""
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[activity] = seconds.get(activity, 0.0) + time.monotonic() - start


@dataclass
class Attempt:
    """A version on its way to the servers. ``tasks`` are the calls that may still be inside a collective."""

    version: int
    progress: dict[str, ServerProgress]
    phase: str = ""
    # No further bucket is requested.
    failed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, asyncio.Future[Any]] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Names the current phase and adds its time."""
        self.phase = phase
        with timed(self.seconds, phase), trace.span("sync", phase, version=self.version):
            yield

    def note(self, part: str, seconds: float) -> None:
        """Records the longest time of a part that several servers or ranks go through concurrently."""
        self.seconds[part] = max(self.seconds.get(part, 0.0), seconds)

    async def wait_for_tasks(self, limit: float, *, every: bool = False) -> None:
        """Waits for all ``tasks``, at most ``limit`` seconds; leaves unfinished ones running.

        Raises PhaseFailed with the first failures, or with all that have not answered in time. With ``every`` it waits
        for all failures, and names no server when the trainer failed, since that fails servers too.
        """
        until = asyncio.ALL_COMPLETED if every else asyncio.FIRST_EXCEPTION
        done, late = await asyncio.wait(self.tasks.values(), timeout=limit, return_when=until)
        causes = {who: cause for who, task in self.tasks.items() if task in done and (cause := task.exception())}
        if not causes:
            timeout = TimeoutError(f"no answer within {limit:g} s")
            causes = {who: timeout for who, task in self.tasks.items() if task in late}
        if every and "trainer" in causes:
            causes = {"trainer": causes["trainer"]}
        if causes:
            raise PhaseFailed(causes)

    def error(self, failure: Exception, quarantined: Mapping[str, str]) -> PublishError:
        """The error for the caller: who failed, in which phase, why, and what each server serves now."""
        causes = self._causes(failure)
        message = (
            f"version {self.version} was not published: phase {self.phase!r} failed: {PhaseFailed(causes)}; "
            f"{self._aftermath(quarantined)}"
        )
        failed = [url for url, server in self.progress.items() if url in causes or server.lost or server.stuck]
        return PublishError(message, self.version, self.phase, quarantined, failed, self._moved(quarantined))

    def _aftermath(self, quarantined: Mapping[str, str]) -> str:
        """What each server serves now."""
        moved = self._moved(quarantined)
        if not quarantined and not moved:
            return "every server keeps serving the previous version"
        parts: list[str] = []
        if quarantined:
            paused = "; ".join(f"{url} ({reason})" for url, reason in quarantined.items())
            parts.append(f"left paused, so as not to serve a mixture of versions: {paused}")
        if moved:
            parts.append(f"version {self.version} is served by {', '.join(moved)}")
        if set(self.progress) - set(quarantined) - set(moved):
            parts.append("every other server keeps serving the previous version")
        return "; ".join(parts)

    def _moved(self, quarantined: Mapping[str, str]) -> list[str]:
        return [url for url, server in self.progress.items() if server.moved and url not in quarantined]

    def _causes(self, failure: Exception) -> dict[str, BaseException]:
        """The first failures and the trainer's own, without servers that only noticed that the trainer was gone."""
        if not isinstance(failure, PhaseFailed):
            return {"trainer": failure}
        causes = dict(failure.causes)
        trainer = self.tasks.get("trainer")
        if trainer is not None and trainer.done() and not trainer.cancelled() and (cause := trainer.exception()):
            causes = {"trainer": cause, **causes}
        first_hand = {who: cause for who, cause in causes.items() if NOT_RECEIVED not in str(cause)}
        return first_hand or causes


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
