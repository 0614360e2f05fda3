"""Publishing through a shared folder: the driver's side, over stock servers that only see that folder.

    connect → write → seal ──────▶ pause → flush → load → verify → continue
    (ranks)   while servers        each server separately: one that fails in a phase stops there, the others proceed
              generate

No process group reaches a server, so servers may be anywhere, join late, and need no plugin. The load itself
(`/update_weights_from_disk`) needs no open weight update and aborts nothing; it runs at once in a paused server.

A server generates only while it holds exactly one version. It resumes after it has reported the new version and its
weights have the checksum of the other servers of its kind (`_install`), or when nothing of the new version was loaded
into it (`ServerProgress.in_doubt`, set before the load). One that fails inside its load may be anywhere between two
versions, because SGLang "rolls back" by reading the same new folder again; so it stays paused, alone, until a later
publish brings it a complete version.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.concurrency.tasks import within
from megasync.errors import ServerError, SyncError
from megasync.serving.answers import parse_as
from megasync.serving.plugin_control import ChecksumReport
from megasync.sync.attempt import Attempt, PhaseFailed, ServerUpdate, each_engine, failures, untouched
from megasync.sync.broadcast.plan import BroadcastPlan
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.weight_sync import SendingRank, TrainerRanks, WeightSync

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

# How SGLang's answer begins when it could not open the folder. It has not touched the model then.
NOT_LOADED = "Failed to get weights iterator"


@dataclass(frozen=True, slots=True)
class SealedVersion:
    """A complete version on disk. ``sums``: checksum of a server's weights after loading it, by kind of server."""

    version: int
    path: Path
    sums: dict[str, str]


@prepared
class _ServerInfo(msgspec.Struct):
    tp_size: Any = None
    pp_size: Any = None
    dtype: Any = None
    quantization: Any = None
    nnodes: int = 1


class DiskServer(ServerUpdate):
    """A server that loads versions from a folder.

    Attributes:
        kind: servers of one kind keep the same bytes for a version; "" while it is not known.
        nodes: hosts that it runs on; None while `kind` is not known.
        reading: the folder that it is loading, until it has answered.
    """

    def __init__(self, server: ServerControl, pause_mode: str, seconds: float) -> None:
        super().__init__(server, pause_mode, seconds)
        self.kind = ""
        self.nodes: int | None = None
        self.reading: Path | None = None

    async def ask_kind(self) -> None:
        """Asks what the server is. Raises ServerError."""
        info = parse_as(
            await self.server.get("/server_info", timeout=self._seconds), _ServerInfo, f"{self.url}/server_info"
        )
        self.kind = f"TP {info.tp_size}, PP {info.pp_size}, {info.dtype}, {info.quantization}"
        self.nodes = info.nnodes

    async def load(self, sealed: SealedVersion, attempt: Attempt) -> None:
        """Has all its ranks read the version. Raises ServerError."""
        progress = attempt.progress[self.url]
        progress.in_doubt, self.reading = True, sealed.path
        body = {
            "model_path": str(sealed.path),
            "load_format": "safetensors",
            "weight_version": str(sealed.version),
            # Flushed already, at a point where a refusal leaves the old version complete.
            "flush_cache": False,
        }
        try:
            await self.post("/update_weights_from_disk", body)
        except ServerError as error:
            # The first rank answers for all of them, so on several hosts another one may have seen the folder.
            progress.in_doubt = not untouched(error, NOT_LOADED) or self.nodes != 1
            if not any(each and isinstance(each.__cause__, TimeoutError) for each in each_engine(error)):
                self.reading = None
            raise
        self.reading = None

    async def checksum(self) -> str:
        """One text for all bytes of all ranks' weights. Raises ServerError."""
        answer = await self.post("/weights_checker", {"action": "checksum"})
        report = parse_as(answer, ChecksumReport, f"{self.url}/weights_checker")
        sums = [rank.checksums for rank in report.ranks]
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


D = TypeVar("D", bound=DiskServer)


class DiskSync(WeightSync[DiskServer]):
    """Publishes versions as folders on a disk that ranks, servers and this process share.

    A method ``disk_x`` of the ranks is `DiskWriter.x` on each of them, and their writers hold the same plan.
    """

    _update_type = DiskServer

    def __init__(
        self,
        servers: Sequence[ServerControl],
        ranks: TrainerRanks,
        plan: BroadcastPlan,
        folders: VersionFolders,
        config: SyncConfig,
        timeouts: TimeoutConfig,
    ) -> None:
        # Folders of servers that were removed, or added again, while they may still have been reading.
        self._left_reading: set[Path] = set()
        super().__init__(servers, ranks, config, timeouts)
        self._plan = plan
        self._folders = folders
        self._joined = False
        self._connections = 0
        self._last: SealedVersion | None = None

    def remove(self, url: str) -> None:
        gone = self._servers.get(url)
        if gone is not None and gone.reading is not None:
            self._left_reading.add(gone.reading)
        super().remove(url)

    def forget_ranks(self, data_parallel: int) -> None:
        # The folders' plan stays: it has the same buckets, of other ranks.
        self._plan = self._plan.with_data_parallel(data_parallel)
        self._joined = False

    async def close(self) -> None:
        """Ranks leave their groups. Servers keep serving what they hold; the last versions stay on the disk."""
        async with self._lock:
            await self._leave()
            self._folders.close()

    async def _move(self, servers: list[DiskServer], attempt: Attempt, *, everywhere: bool) -> int:
        """The bytes that were written, once, however many servers read them.

        Late servers load the version that was published last from its folder, and nothing is written.
        """
        sealed, written = self._last, 0
        if everywhere or sealed is None or sealed.version != attempt.version:
            await self._connect(servers, attempt)
            sealed, written = await self._write(attempt), self._plan.nbytes
        await self._install(servers, sealed, attempt)
        self._last = sealed
        return written

    # Write

    async def _connect(self, servers: list[DiskServer], attempt: Attempt) -> None:
        """Makes the folder and joins the ranks of each stage; asks no server."""
        if self._joined:
            return
        self._connections += 1
        with attempt.during("connect"):
            await asyncio.to_thread(self._folders.prepare)
            addresses = await self._ranks.on_all(self._limit, SendingRank.disk_listen, self._seconds)
            name = f"megasync-disk-{self._connections}"
            await self._ranks.on_all(self._limit, SendingRank.disk_join, name, addresses, self._seconds)
        self._joined = True

    async def _write(self, attempt: Attempt) -> SealedVersion:
        """Has the ranks write the version and gives it its final name; removes an unfinished one."""
        with attempt.during("write"):
            draft = await asyncio.to_thread(self._folders.draft, attempt.version)
        try:
            with attempt.during("write"):
                reports = await self._ranks.on_all(
                    self._limit, SendingRank.disk_write, str(draft), attempt.version, self._seconds
                )
            for activity in ("pack", "wire", "disk"):
                attempt.note(activity, max(report.seconds[activity] for report in reports))
            files = {name: written for report in reports for name, written in report.files.items()}
            with attempt.during("seal"):
                sealing = asyncio.to_thread(self._folders.seal, draft, attempt.version, files)
                path = await within(sealing, self._seconds)
        except BaseException:
            await asyncio.to_thread(self._folders.discard, draft)
            raise
        return SealedVersion(attempt.version, path, {})

    # Install

    async def _install(self, servers: Sequence[DiskServer], sealed: SealedVersion, attempt: Attempt) -> None:
        """Brings each server to a sealed version. Raises PhaseFailed once the other servers serve it."""
        sums: dict[str, str] = {}

        async def verify(server: DiskServer) -> None:
            await server.verify(attempt)
            sums[server.url] = await server.checksum()

        @cache
        def mismatches() -> dict[str, SyncError]:
            kinds = {server.url: server.kind for server in servers if server.url in sums}
            return _checksum_mismatches(kinds, sums, sealed)

        async def compare(server: DiskServer) -> None:
            if error := mismatches().get(server.url):
                raise error
            attempt.progress[server.url].in_doubt = False

        await in_phases(
            servers,
            attempt,
            ("ask", DiskServer.ask_kind),
            ("pause", lambda server: server.pause(attempt)),
            ("flush", DiskServer.flush),
            ("load", lambda server: server.load(sealed, attempt)),
            ("verify", verify),
            ("verify", compare),
            ("continue", lambda server: self._resume(server, attempt)),
        )

    # Clean-up

    async def _clean_up(self, attempt: Attempt) -> None:
        if attempt.phase in ("connect", "write"):
            await self._leave()

    async def _leave(self) -> None:
        self._joined = False
        await self._leave_ranks(SendingRank.disk_leave)

    async def _finish(self) -> None:
        """Removes old versions, except those that are still needed."""
        try:
            await asyncio.to_thread(self._folders.prune, self._busy())
        except OSError as error:
            log.warning("Old versions could not be removed from %s: %s", self._folders.root, error)

    def _busy(self) -> set[Path]:
        """Versions that a server may be reading, and the one that late servers get."""
        reading = {server.reading for server in self._servers.values() if server.reading is not None}
        return reading | self._left_reading | ({self._last.path} if self._last is not None else set())


async def in_phases(
    servers: Sequence[D], attempt: Attempt, *phases: tuple[str, Callable[[D], Awaitable[None]]]
) -> None:
    """Takes each server through the phases, all servers together; one that fails in a phase stops there.

    Raises PhaseFailed with all failures, after the last phase. The attempt's phase is that of the first failure.
    """
    causes: dict[str, BaseException] = {}
    first = ""
    for phase, call in phases:
        going = [server for server in servers if server.url not in causes]
        with attempt.during(phase):
            failed = await failures(going, call)
        if failed and not causes:
            first = phase
        causes |= failed
    if causes:
        attempt.phase = first
        raise PhaseFailed(causes)


def _checksum_mismatches(
    kinds: Mapping[str, str], sums: Mapping[str, str], sealed: SealedVersion
) -> dict[str, SyncError]:
    """Servers whose weights differ from those of the others of their kind, by URL; fills in ``sealed.sums``.

    The right checksum of a kind is what a server of it had after an earlier load of this version, else what most of
    them have. A server that is the only one of its kind is not compared.
    """
    mismatches: dict[str, SyncError] = {}
    for kind in sorted(set(kinds.values())):
        same = [url for url in kinds if kinds[url] == kind]
        common, votes = Counter(sums[url] for url in same).most_common(1)[0]
        if kind not in sealed.sums and 2 * votes > len(same):
            sealed.sums[kind] = common
        for url in same:
            if sums[url] != sealed.sums.get(kind):
                mismatches[url] = SyncError(
                    f"its weights have another checksum than those of the other servers of its kind ({kind}) after "
                    f"loading {sealed.path}"
                )
    return mismatches
