"""What every transport is: a changing set of servers, those it left paused, and a publish that cleans up after itself.

A server generates only while it holds exactly one version. After a failure `WeightSync._transaction` resumes each
server that holds one complete version and quarantines the others; only a later publish that brings a quarantined server
a complete version resumes it (`_resume`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from megasync.errors import SyncError
from megasync.sync.attempt import RECOVERY_SECONDS, Attempt, PhaseFailed, S, ServerProgress, SyncReport

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.layout.engine_layout import EngineRank
    from megasync.serving.control import ServerControl
    from megasync.sync.messages import SendReport, SendRequest, WriteReport

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

# The ranks keep the deadline themselves. The driver waits a little longer, so that it receives their reason.
GRACE_SECONDS = 5.0


Address = tuple[str, int]


class SendingRank(Protocol):
    """A trainer rank as transports call it: ``sync_x``, ``shard_x`` and ``disk_x`` are x of its sender or writer."""

    def sync_listen(self, timeout: float) -> Address | None: ...
    def sync_join(self, name: str, addresses: Sequence[Address | None], engine_ranks: int, timeout: float) -> None: ...
    def sync_send(self, version: int, timeout: float) -> dict[str, float]: ...
    def sync_leave(self) -> None: ...
    def shard_listen(self, timeout: float) -> Address | None: ...
    def shard_prepare(
        self, name: str, engine: Sequence[EngineRank], shares: Sequence[int], replicas: Sequence[int]
    ) -> str: ...
    def shard_send(self, request: SendRequest) -> SendReport: ...
    def shard_leave(self, names: Iterable[str] | None = None) -> None: ...
    def disk_listen(self, timeout: float) -> Address | None: ...
    def disk_join(self, name: str, addresses: Sequence[Address | None], timeout: float) -> None: ...
    def disk_write(self, folder: str, version: int, timeout: float) -> WriteReport: ...
    def disk_leave(self) -> None: ...


class TrainerRanks(Protocol):
    """All trainer ranks."""

    async def on_all(
        self, timeout: float, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls a method of `SendingRank` on every rank: results in rank order, within ``timeout`` seconds.

        Raises when a rank failed or the time is up.
        """
        ...


class WeightSync(ABC, Generic[S]):
    """A transport: publishes versions to a changing set of servers, one publish at a time.

    Each phase has a deadline of ``timeouts.weight_sync`` seconds, and each step of the clean-up after a failure one of
    `RECOVERY_SECONDS`.

    Args:
        servers: the first servers; `add` and `remove` change them.
        ranks: every trainer rank, in rank order.
    """

    # A server's side of the transport.
    _update_type: type[S]

    def __init__(
        self, servers: Sequence[ServerControl], ranks: TrainerRanks, config: SyncConfig, timeouts: TimeoutConfig
    ) -> None:
        self._ranks = ranks
        self._pause_mode = config.pause_mode
        self._seconds = timeouts.weight_sync
        # For calls to the trainer ranks.
        self._limit = self._seconds + GRACE_SECONDS
        self._servers: dict[str, S] = {}
        self._quarantined: dict[str, str] = {}
        self._lock = asyncio.Lock()
        for server in servers:
            self.add(server)

    @property
    def quarantined(self) -> dict[str, str]:
        """Servers that a failed publish left paused, with the reason."""
        return dict(self._quarantined)

    def add(self, server: ServerControl) -> None:
        """The next publish updates this server too, whatever it holds now."""
        self.remove(server.url)
        self._servers[server.url] = self._update_type(server, self._pause_mode, self._seconds)

    def remove(self, url: str) -> None:
        """The server is no longer updated."""
        self._servers.pop(url, None)
        self._quarantined.pop(url, None)

    @abstractmethod
    def forget_ranks(self, data_parallel: int) -> None:
        """Forgets groups and links, because the trainer ranks were restarted, perhaps in another number."""

    async def connect(self) -> None:
        """Does the work that needs no pause ahead of the first publish; `publish` does it when needed.

        Raises PublishError when a server or a rank could not connect within the deadline; nothing waits for it then.
        """
        async with self._lock:
            attempt = self._new_attempt(0)
            async with self._transaction(attempt):
                await self._connect(list(self._servers.values()), attempt)

    async def publish(self, version: int, only: Collection[str] | None = None) -> SyncReport:
        """Moves the trainer's weights into every server as ``version``; returns once each of them reports it.

        With ``only``, a collection of URLs, the other servers have the version already. Raises PublishError, which
        names the servers, the phase and the version, and says which servers stay paused. The same or a later version
        may be published next.
        """
        async with self._lock:
            attempt = self._new_attempt(version)
            try:
                async with self._transaction(attempt):
                    servers = self._select(only)
                    moved = await self._move(servers, attempt, everywhere=only is None)
            finally:
                await self._finish()
        log.info("Published version %d: %s", version, attempt.seconds)
        return SyncReport(version, tuple(server.url for server in servers), moved, attempt.seconds)

    @abstractmethod
    async def close(self) -> None:
        """Leaves groups and links on both sides. Servers keep serving what they hold."""

    def _new_attempt(self, version: int) -> Attempt:
        return Attempt(version, {url: ServerProgress() for url in self._servers})

    def _select(self, only: Collection[str] | None) -> list[S]:
        """All servers, or those that ``only`` names. Raises PhaseFailed when one of those is gone."""
        if only is None:
            return list(self._servers.values())
        if gone := {url: SyncError("it is no longer among the servers") for url in only if url not in self._servers}:
            raise PhaseFailed(gone)
        return [server for url, server in self._servers.items() if url in only]

    @abstractmethod
    async def _connect(self, servers: list[S], attempt: Attempt) -> None:
        """Connects these servers and the ranks, unless they are connected."""

    @abstractmethod
    async def _move(self, servers: list[S], attempt: Attempt, *, everywhere: bool) -> int:
        """Connects when needed and brings the servers to the attempt's version; the bytes for the report.

        ``everywhere``: these are all servers. Otherwise the others may hold the version already.
        """

    async def _finish(self) -> None:
        """Runs after every publish, successful or not. Raises nothing."""

    @asynccontextmanager
    async def _transaction(self, attempt: Attempt) -> AsyncIterator[None]:
        """When its body fails or is cancelled, cleans up and resumes the servers that may be resumed."""
        try:
            yield
        except BaseException as error:
            await self._clean_up(attempt)
            await asyncio.gather(*(self._release(server, attempt) for server in self._involved(attempt)))
            if not isinstance(error, Exception):
                raise
            raise attempt.error(error, self._quarantined) from error

    @abstractmethod
    async def _clean_up(self, attempt: Attempt) -> None:
        """Ends what a failed attempt left behind on both sides. Raises nothing."""

    def _involved(self, attempt: Attempt) -> list[S]:
        """The servers that the attempt may have paused."""
        return [server for url, server in self._servers.items() if url in attempt.progress]

    async def _release(self, server: S, attempt: Attempt) -> None:
        if reason := await server.release(attempt, server.url in self._quarantined):
            self._quarantined[server.url] = reason

    async def _resume(self, server: S, attempt: Attempt) -> None:
        await server.resume(attempt)
        self._quarantined.pop(server.url, None)

    async def _leave_ranks(
        self, method: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Has the ranks close their groups or links. Raises nothing."""
        leaving = self._ranks.on_all(RECOVERY_SECONDS, method, *args, **kwargs)
        for failure in await asyncio.gather(leaving, return_exceptions=True):
            if isinstance(failure, BaseException):
                log.warning("Some trainer ranks did not leave their sync groups: %s", failure)
