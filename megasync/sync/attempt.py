"""One publish under way: how far each server came, what failed, and the sentence that says so.

No I/O. `Standing.mixed` is the fact on which safety rests: it is set before a bucket is asked for and cleared only when
the server said that nothing arrived, so a server whose state is not known counts as mixed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from megasync.errors import SyncError

# How SGLang begins its answer when a bucket did not arrive; the model was not touched then.
NOT_RECEIVED = "Failed to receive weights"


@dataclass(frozen=True)
class SyncReport:
    """A published version: the URLs of those who hold it, bytes that their ranks received together, seconds by phase.

    ``pack`` and ``wire`` are the slowest sender's own times inside ``transfer``; they overlap.
    """

    version: int
    servers: tuple[str, ...]
    bytes: int
    seconds: Mapping[str, float]


class PublishError(SyncError):
    """A version that was not published.

    Attributes:
        engines: who failed first, by server URL or "trainer".
        failed: servers that failed or did not answer afterwards; empty when nobody but the trainer did.
        moved: servers that hold the new version and generate from it.
        quarantined: each server left paused, with the reason.
    """

    def __init__(
        self,
        message: str,
        version: int,
        phase: str,
        engines: Sequence[str],
        quarantined: Mapping[str, str],
        failed: Iterable[str] = (),
        moved: Iterable[str] = (),
    ) -> None:
        super().__init__(message)
        self.version = version
        self.phase = phase
        self.engines = tuple(engines)
        self.quarantined = dict(quarantined)
        self.failed = tuple(failed)
        self.moved = tuple(moved)


class PhaseFailed(Exception):
    """What went wrong in a phase, by server URL or "trainer"."""

    def __init__(self, causes: Mapping[str, BaseException]) -> None:
        super().__init__("; ".join(f"{who}: {str(cause) or type(cause).__name__}" for who, cause in causes.items()))
        self.causes = dict(causes)


@dataclass
class Standing:
    """What one publish has done to one server so far."""

    paused: bool = False
    # Clock reading at which it was paused.
    since: float = 0.0
    begun: bool = False
    # Buckets that the server has loaded.
    loaded: int = 0
    # A bucket was asked for, and the server did not say that it is loaded or that nothing of it arrived.
    in_doubt: bool = False
    # It does not come back from a collective, so it answers nothing else.
    stuck: bool = False
    # It holds the new version as a whole, and generates from it unless it stays paused.
    moved: bool = False
    # It did not answer when the publish was cleaned up.
    lost: bool = False

    @property
    def mixed(self) -> bool:
        """True when the server may hold something else than the previous version as a whole."""
        return self.loaded > 0 or self.in_doubt

    def describe(self, version: int, buckets: int) -> str:
        text = f"it loaded {self.loaded} of {buckets} buckets of version {version}"
        if self.in_doubt:
            text += ", and the next one is in doubt"
        if self.stuck:
            text += "; it is stuck waiting for a trainer that is gone: restart it"
        return text


@dataclass
class Attempt:
    """A version on its way to the servers. ``tasks`` are the calls that may still be inside a collective."""

    version: int
    standing: dict[str, Standing]
    phase: str = ""
    # No further bucket is asked for.
    failed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, asyncio.Future] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Names the current phase and adds its time."""
        self.phase = phase
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def note(self, part: str, seconds: float) -> None:
        """Keeps the longest time of a part that several servers or ranks go through at once."""
        self.seconds[part] = max(self.seconds.get(part, 0.0), seconds)

    async def together(self, limit: float) -> None:
        """Waits for all ``tasks``, at most ``limit`` seconds; leaves unfinished ones running.

        Raises:
            PhaseFailed: with the first failures, or with everyone who has not answered in time.
        """
        done, late = await asyncio.wait(self.tasks.values(), timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
        causes = {who: task.exception() for who, task in self.tasks.items() if task in done and task.exception()}
        if not causes:
            silence = TimeoutError(f"no answer within {limit:g} s")
            causes = {who: silence for who, task in self.tasks.items() if task in late}
        if causes:
            raise PhaseFailed(causes)

    def error(self, failure: Exception, quarantined: Mapping[str, str]) -> PublishError:
        """The error for the caller: who, in which phase, why, and what the servers do now."""
        causes = self._causes(failure)
        message = (
            f"version {self.version} was not published: phase {self.phase!r} failed: {PhaseFailed(causes)}; "
            f"{self._aftermath(quarantined)}"
        )
        failed = [url for url, standing in self.standing.items() if url in causes or standing.lost or standing.stuck]
        return PublishError(
            message, self.version, self.phase, list(causes), quarantined, failed, self._moved(quarantined)
        )

    def _aftermath(self, quarantined: Mapping[str, str]) -> str:
        """What the servers do now."""
        moved = self._moved(quarantined)
        if not quarantined and not moved:
            return "every server goes on with the version before"
        parts = []
        if quarantined:
            paused = "; ".join(f"{url} ({reason})" for url, reason in quarantined.items())
            parts.append(f"left paused, not to serve a mixture of versions: {paused}")
        if moved:
            parts.append(f"version {self.version} is served by {', '.join(moved)}")
        if set(self.standing) - set(quarantined) - set(moved):
            parts.append("every other server goes on with the version before")
        return "; ".join(parts)

    def _moved(self, quarantined: Mapping[str, str]) -> list[str]:
        return [url for url, standing in self.standing.items() if standing.moved and url not in quarantined]

    def _causes(self, failure: Exception) -> dict[str, BaseException]:
        """What failed first, and what the trainer said later; without servers that only noticed that it was gone."""
        if not isinstance(failure, PhaseFailed):
            return {"trainer": failure}
        causes = dict(failure.causes)
        trainer = self.tasks.get("trainer")
        if trainer is not None and trainer.done() and not trainer.cancelled() and trainer.exception():
            causes = {"trainer": trainer.exception(), **causes}
        first_hand = {who: cause for who, cause in causes.items() if NOT_RECEIVED not in str(cause)}
        return first_hand or causes


class Addressed(Protocol):
    """Anything that stands for one server."""

    @property
    def url(self) -> str: ...


S = TypeVar("S", bound=Addressed)


def chosen(servers: Mapping[str, S], only: Collection[str] | None) -> list[S]:
    """The servers that a publish is for: all, or those that ``only`` names. Raises PhaseFailed for one that is gone."""
    if only is None:
        return list(servers.values())
    if gone := {url: SyncError("it is no longer among the servers") for url in only if url not in servers}:
        raise PhaseFailed(gone)
    return [servers[url] for url in servers if url in only]


async def failures(servers: Iterable[S], call: Callable[[S], Awaitable[Any]]) -> dict[str, BaseException]:
    """Calls every server at once and waits for all answers, so that it is known what each of them did; who failed."""
    servers = list(servers)
    answers = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
    return {s.url: a for s, a in zip(servers, answers, strict=True) if isinstance(a, BaseException)}


async def each(servers: Iterable[S], call: Callable[[S], Awaitable[Any]]) -> None:
    """As `failures`, but raises PhaseFailed if there are any."""
    if causes := await failures(servers, call):
        raise PhaseFailed(causes)
