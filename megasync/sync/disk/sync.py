"""Publishing a version through a shared folder: the driver's side, over stock servers that only see that folder.

    connect → write → seal ──────▶ pause → flush → load → verify → continue
    (ranks)   while servers        every server by itself: one that fails in a phase goes no further, the others do
              go on generating

No process group reaches a server, so servers may be anywhere, come late, and carry no plugin. The load itself
(`/update_weights_from_disk`) needs no open weight update and aborts nothing; it runs at once in a paused server.

A server generates only while it holds exactly one version: it continues after it has reported the new version and its
weights have the checksum of the others of its kind (`_verify`), or when nothing of the new version was loaded into it
(`Standing.in_doubt`, set before the load). One that fails inside its load may be anywhere between two versions - SGLang
"rolls back" by reading the same new folder again - so it stays paused, alone, until a later publish brings it a whole
version.

Every phase has a deadline of ``timeouts.weight_sync`` seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megasync.errors import InvalidAnswer, ServerError, SyncError
from megasync.sync.attempt import Attempt, PhaseFailed, Standing, SyncReport, chosen, failures
from megasync.sync.broadcast.plan import BroadcastPlan
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.served import RECOVERY_SECONDS, Served

if TYPE_CHECKING:
    from megasync.config.schema import SyncConfig, TimeoutConfig
    from megasync.serving.control import ServerControl
    from megasync.sync.broadcast.sync import TrainerRanks

log = logging.getLogger(__name__)

# The ranks keep their own deadline; the driver waits a little longer, so that it hears their reason.
GRACE_SECONDS = 5.0
# How SGLang begins its answer when it could not open the folder; the model was not touched then.
NOT_LOADED = "Failed to get weights iterator"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A complete version on disk. ``sums``: checksum of a server's weights after loading it, by kind of server."""

    version: int
    path: Path
    sums: dict[str, str]


class DiskServer(Served):
    """A server that loads versions from a folder.

    Attributes:
        kind: servers of one kind keep the same bytes for a version, or "" while that is not known.
        nodes: machines that it runs on; None as long as `kind` is.
        reading: the folder that it was told to load and has not answered for.
    """

    def __init__(self, server: ServerControl, pause_mode: str, seconds: float) -> None:
        super().__init__(server, pause_mode, seconds)
        self.kind = ""
        self.nodes: int | None = None
        self.reading: Path | None = None

    async def ask_kind(self) -> None:
        info = await self.server.get("/server_info", timeout=self._seconds)
        if not isinstance(info, dict) or not isinstance(info.get("nnodes", 1), int):
            raise InvalidAnswer(f"{self.url}/server_info does not say what the server is: {info!r:.300}")
        self.kind = (
            f"TP {info.get('tp_size')}, PP {info.get('pp_size')}, {info.get('dtype')}, {info.get('quantization')}"
        )
        self.nodes = info.get("nnodes", 1)

    async def load(self, sealed: Sealed, attempt: Attempt) -> None:
        """Has all its ranks read the version. Raises ServerError."""
        standing = attempt.standing[self.url]
        standing.in_doubt, self.reading = True, sealed.path
        body = {
            "model_path": str(sealed.path),
            "load_format": "safetensors",
            "weight_version": str(sealed.version),
            # Done already, where a refusal still leaves the old version whole.
            "flush_cache": False,
        }
        try:
            await self._post("/update_weights_from_disk", body)
        except ServerError as error:
            # The first rank answers for all of them, so on several nodes another one may have seen the folder.
            standing.in_doubt = NOT_LOADED not in str(error) or self.nodes != 1
            if not isinstance(error.__cause__, TimeoutError):
                self.reading = None
            raise
        self.reading = None

    async def checksum(self) -> str:
        """One text for all bytes of all ranks' weights."""
        found = await self._post("/weights_checker", {"action": "checksum"})
        sums = [rank["checksums"] for rank in found["ranks"]]
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


class DiskSync:
    """Publishes versions to a changing set of servers; one publish at a time.

    Args:
        ranks: every trainer rank, in rank order; a method ``disk_x`` is `DiskWriter.x` on each of them.
        plan: the plan that the ranks' writers hold too.
        folders: where versions go, on a disk that ranks, servers and this process share.
    """

    def __init__(
        self,
        servers: Sequence[ServerControl],
        ranks: TrainerRanks,
        plan: BroadcastPlan,
        folders: VersionFolders,
        config: SyncConfig,
        timeouts: TimeoutConfig,
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._folders = folders
        self._pause_mode = config.pause_mode
        self._seconds = timeouts.weight_sync
        self._servers: dict[str, DiskServer] = {}
        self._joined = False
        self._connections = 0
        self._last: Sealed | None = None
        # Folders of servers that were removed, or added anew, while they may still have been reading.
        self._left_reading: set[Path] = set()
        self._lock = asyncio.Lock()
        self._quarantined: dict[str, str] = {}
        for server in servers:
            self.add(server)

    @property
    def quarantined(self) -> dict[str, str]:
        """Servers that a failed load left paused, with the reason."""
        return dict(self._quarantined)

    def add(self, server: ServerControl) -> None:
        """From the next publish on this server is updated too, whatever it holds now."""
        self._forget(server.url)
        self._servers[server.url] = DiskServer(server, self._pause_mode, self._seconds)

    def remove(self, url: str) -> None:
        """The server is no longer updated."""
        self._forget(url)
        self._quarantined.pop(url, None)

    def _forget(self, url: str) -> None:
        gone = self._servers.pop(url, None)
        if gone is not None and gone.reading is not None:
            self._left_reading.add(gone.reading)

    def forget_ranks(self) -> None:
        """The trainer ranks are new processes, which have yet to join each other."""
        self._joined = False

    async def connect(self) -> None:
        """Makes the folder and joins the ranks of each stage; no server is asked. `publish` does it when needed.

        Raises:
            PublishError: the folder cannot be made, or a rank did not come within the deadline.
        """
        async with self._lock:
            attempt = self._new_attempt(0)
            async with self._failing(attempt):
                await self._connect(attempt)

    async def publish(self, version: int, only: Collection[str] | None = None) -> SyncReport:
        """Writes the trainer's weights and loads them into every server; returns once each of them reports ``version``.

        The report's bytes are those of the tensors written, once, however many servers read them.

        Args:
            only: URLs of the servers to bring to the version, when the others have it already; if it is the one that
                was published last, its folder is read again and nothing is written.

        Raises:
            PublishError: names the servers, the phase and the version, and says who serves what. Publishing again,
                the same or a later version, is allowed.
        """
        async with self._lock:
            attempt = self._new_attempt(version)
            try:
                async with self._failing(attempt):
                    servers = chosen(self._servers, only)
                    sealed = self._last
                    written = only is None or sealed is None or sealed.version != version
                    if written:
                        await self._connect(attempt)
                        sealed = await self._write(attempt)
                    await self._install(servers, sealed, attempt)
                    self._last = sealed
            finally:
                await self._prune()
        log.info("published version %d: %s", version, attempt.seconds)
        urls = tuple(server.url for server in servers)
        return SyncReport(version, urls, self._plan.nbytes if written else 0, attempt.seconds)

    async def close(self) -> None:
        """Ranks leave their groups. Servers go on with what they serve; the last versions stay on the disk."""
        async with self._lock:
            await self._leave()

    def _new_attempt(self, version: int) -> Attempt:
        return Attempt(version, {url: Standing() for url in self._servers})

    @asynccontextmanager
    async def _failing(self, attempt: Attempt) -> AsyncIterator[None]:
        """On any failure, or when cancelled, closes broken groups and releases what may be released."""
        try:
            yield
        except BaseException as error:
            if attempt.phase in ("connect", "write"):
                await self._leave()
            ours = [server for url, server in self._servers.items() if url in attempt.standing]
            await asyncio.gather(*(self._release(server, attempt) for server in ours))
            if not isinstance(error, Exception):
                raise
            raise attempt.error(error, self._quarantined) from error

    # Write

    async def _connect(self, attempt: Attempt) -> None:
        if self._joined:
            return
        limit = self._seconds + GRACE_SECONDS
        self._connections += 1
        with attempt.during("connect"):
            await asyncio.to_thread(self._folders.prepare)
            addresses = await self._ranks.call("disk_listen", self._seconds, timeout=limit)
            name = f"megasync-disk-{self._connections}"
            await self._ranks.call("disk_join", name, addresses, self._seconds, timeout=limit)
        self._joined = True

    async def _write(self, attempt: Attempt) -> Sealed:
        """Has the ranks write the version and gives it its final name; what was not finished is removed."""
        with attempt.during("write"):
            draft = await asyncio.to_thread(self._folders.draft, attempt.version)
        limit = self._seconds + GRACE_SECONDS
        try:
            with attempt.during("write"):
                writing = self._ranks.call("disk_write", str(draft), attempt.version, self._seconds, timeout=limit)
                results = await writing
            for activity in ("pack", "wire", "disk"):
                attempt.note(activity, max(result["seconds"][activity] for result in results))
            files = {name: written for result in results for name, written in result["files"].items()}
            with attempt.during("seal"):
                sealing = asyncio.to_thread(self._folders.seal, draft, attempt.version, files)
                path = await asyncio.wait_for(sealing, self._seconds)
        except BaseException:
            await asyncio.to_thread(self._folders.discard, draft)
            raise
        return Sealed(attempt.version, path, {})

    # Install

    async def _install(self, servers: Sequence[DiskServer], sealed: Sealed, attempt: Attempt) -> None:
        """Brings each server to a sealed version; one that fails in a phase goes no further.

        Raises:
            PhaseFailed: with all of them, once the others serve the version; the attempt's phase is that of the first.
        """
        sums: dict[str, str] = {}

        async def verify(server: DiskServer) -> None:
            await server.verify(attempt)
            sums[server.url] = await server.checksum()

        phases: tuple[tuple[str, Callable[[DiskServer], Awaitable[None]]], ...] = (
            ("ask", DiskServer.ask_kind),
            ("pause", lambda server: server.pause(attempt)),
            ("flush", DiskServer.flush),
            ("load", lambda server: server.load(sealed, attempt)),
            ("verify", verify),
            ("continue", lambda server: self._go_on(server, attempt)),
        )
        causes: dict[str, BaseException] = {}
        first = ""
        for phase, call in phases:
            going = [server for server in servers if server.url not in causes]
            with attempt.during(phase):
                failed = await failures(going, call)
            if phase == "verify":
                kinds = {server.url: server.kind for server in going if server.url not in failed}
                failed |= _dissenters(kinds, sums, sealed)
                for url in kinds.keys() - failed.keys():
                    attempt.standing[url].in_doubt = False
            if failed and not causes:
                first = phase
            causes |= failed
        if causes:
            attempt.phase = first
            raise PhaseFailed(causes)

    async def _go_on(self, server: DiskServer, attempt: Attempt) -> None:
        await server.go_on(attempt)
        self._quarantined.pop(server.url, None)

    # Clean-up

    async def _leave(self) -> None:
        """Ranks close their groups and forget their buckets. Nothing here raises."""
        self._joined = False
        leaving = self._ranks.call("disk_leave", timeout=RECOVERY_SECONDS)
        for failure in await asyncio.gather(leaving, return_exceptions=True):
            if isinstance(failure, BaseException):
                log.warning("not every trainer rank left the sync groups: %s", failure)

    async def _release(self, server: DiskServer, attempt: Attempt) -> None:
        if reason := await server.release(attempt, server.url in self._quarantined):
            self._quarantined[server.url] = reason

    async def _prune(self) -> None:
        """Removes old versions, but none that a server may be reading, nor the one that late servers get."""
        busy = {server.reading for server in self._servers.values() if server.reading is not None} | self._left_reading
        if self._last is not None:
            busy.add(self._last.path)
        try:
            await asyncio.to_thread(self._folders.prune, busy)
        except OSError as error:
            log.warning("old versions could not be removed from %s: %s", self._folders.root, error)


def _dissenters(kinds: Mapping[str, str], sums: Mapping[str, str], sealed: Sealed) -> dict[str, SyncError]:
    """Servers whose weights are not those of the others of their kind, by URL; ``sealed.sums`` learns what is right.

    What is right for a kind: what a server of it had after an earlier load of this version, else what most of them have.
    A single server of its kind is compared with nobody.
    """
    found: dict[str, SyncError] = {}
    for kind in sorted(set(kinds.values())):
        same = [url for url in kinds if kinds[url] == kind]
        common, votes = Counter(sums[url] for url in same).most_common(1)[0]
        if kind not in sealed.sums and 2 * votes > len(same):
            sealed.sums[kind] = common
        for url in same:
            if sums[url] != sealed.sums.get(kind):
                found[url] = SyncError(
                    f"its weights have another checksum than those of other servers of its kind ({kind}) after loading "
                    f"{sealed.path}"
                )
    return found
