"""Publishing adapters alone: servers keep the model, load the adapters of a version beside it, and switch to them.

    connect → write → seal ──────▶ load → switch → verify
    (ranks)   while servers        each server separately, all while it generates

No server is paused, and no server can hold a mixture: an adapter has a name of its own, and requests name the one they
use. `sglang.adapters` gives a request that names none the adapter of the server's version when it begins,
and reports that version for all of its tokens. So a request that runs during the switch ends with the adapter it began
with; with `sync.pause_mode=abort` it is aborted, and its response continues with the new one.

A server checks the bytes that it reads against the manifest of the version.

A version may be held (`AdapterSync.hold`): every server loads its folder once more under another name, which the plugin
never unloads, and a server that joins meanwhile loads it before it serves. So a request for that name never fails for
want of the adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from safetensors.torch import load_file, save_file

from megasync.base.files import atomic_write, fsync
from megasync.errors import ServerError, SyncError
from megasync.layout.adapter import AdapterLayout, adapter_config
from megasync.layout.shards import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megasync.serving.plugin_protocol import KEPT_ADAPTER, POLICY_ADAPTER
from megasync.sync.attempt import Attempt, PhaseFailed, failures
from megasync.sync.disk.sync import DiskServer, DiskSync, SealedVersion, in_phases
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.messages import WrittenFile

if TYPE_CHECKING:
    from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)


class AdapterFolders(VersionFolders):
    """Each sealed version is a PEFT folder. The plan is one of an `AdapterLayout`."""

    def _complete(self, draft: Path, files: Mapping[str, WrittenFile]) -> Mapping[str, WrittenFile]:
        layout = self._plan.layout
        assert isinstance(layout, AdapterLayout)
        tensors = {}
        for name, written in files.items():
            if _digest(draft / name) != written.sha256:
                raise SyncError(f"{draft / name} does not hold here what its rank wrote")
            tensors |= load_file(draft / name)
        weights = draft / ADAPTER_WEIGHTS
        save_file(tensors, weights, metadata={"format": "pt"})
        fsync(weights)
        for name in files:
            (draft / name).unlink()
        config = adapter_config(layout.shape, str(self._source.resolve()))
        atomic_write(draft / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
        return {ADAPTER_WEIGHTS: WrittenFile(weights.stat().st_size, _digest(weights))}


class AdapterServer(DiskServer):
    """A server with megasync's plugin that serves adapters."""

    def __init__(self, server: ServerControl, pause_mode: str, seconds: float) -> None:
        super().__init__(server, pause_mode, seconds)
        # Names of held versions that it has loaded.
        self._kept: set[str] = set()

    async def keep(self, held: Mapping[str, Path]) -> None:
        """Has it load what is held, by name, and unload what no longer is. Raises ServerError if a load fails."""
        for name in self._kept - held.keys():
            self._kept.discard(name)
            try:
                await self.post("/unload_lora_adapter", {"lora_name": name})
            except ServerError as error:
                log.warning("%s did not unload %s: %s", self.url, name, error)
        for name, path in held.items():
            if name not in self._kept:
                await self._load(name, path)
                self._kept.add(name)

    async def load(self, sealed: SealedVersion, attempt: Attempt) -> None:
        """Has all its ranks read the adapters, which nothing uses yet. Raises ServerError."""
        await self._load(_name(POLICY_ADAPTER, sealed), sealed.path)

    async def _load(self, name: str, path: Path) -> None:
        self.reading = path
        try:
            await self.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except ServerError as error:
            # One that has not answered may still be reading.
            if not isinstance(error.__cause__, TimeoutError):
                self.reading = None
            raise
        self.reading = None

    async def switch(self, attempt: Attempt) -> None:
        """Requests use the adapters of the version from now on. Raises ServerError."""
        body = {"new_version": str(attempt.version), "abort_all_requests": self._pause_mode == "abort"}
        await self.post("/update_weight_version", body)

    async def confirm(self, attempt: Attempt) -> None:
        """Raises SyncError unless the server reports the version."""
        await self.verify(attempt)
        attempt.progress[self.url].moved = True


class AdapterSync(DiskSync):
    """Publishes adapters as PEFT folders on a disk that ranks, servers and this process share."""

    _update_type = AdapterServer
    # What servers keep beside newer versions: folders by the names of the adapters.
    _held: Mapping[str, Path] = MappingProxyType({})

    async def hold(self, version: int) -> str | None:
        """Has every server keep the version until `let_go`; the name of the adapter that requests ask for.

        None unless the version is the one that was published last. Raises SyncError when a server does not load it.
        """
        async with self._lock:
            if self._last is None or self._last.version != version:
                return None
            name = _name(KEPT_ADAPTER, self._last)
            self._held = {**self._held, name: self._last.path}
            held, servers = self._held, cast("Sequence[AdapterServer]", list(self._servers.values()))
            try:
                failed = await failures(servers, lambda server: server.keep(held))
            except asyncio.CancelledError:
                self.let_go(name)
                raise
        # One that has gone meanwhile loads it before it serves again.
        if problems := {url: cause for url, cause in failed.items() if url in self._servers}:
            self.let_go(name)
            raise SyncError(f"adapter {name} was not loaded: {PhaseFailed(problems)}")
        return name

    def let_go(self, name: str) -> None:
        """Servers unload it with the next publish."""
        self._held = {held: path for held, path in self._held.items() if held != name}

    async def _install(self, servers: Sequence[DiskServer], sealed: SealedVersion, attempt: Attempt) -> None:
        await in_phases(
            cast("Sequence[AdapterServer]", servers),
            attempt,
            ("load", lambda server: server.keep(self._held)),
            ("load", lambda server: server.load(sealed, attempt)),
            ("switch", lambda server: server.switch(attempt)),
            ("verify", lambda server: server.confirm(attempt)),
        )

    def _busy(self) -> set[Path]:
        return super()._busy() | set(self._held.values())


def _name(prefix: str, sealed: SealedVersion) -> str:
    """A version that is published again has a folder of another name, and so have its adapters."""
    return prefix + sealed.path.name.removeprefix("v")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
