"""Publishing adapters alone: servers keep the model, load the adapters of a version beside it, and switch to them.

    connect → write → seal ──────▶ load → switch → verify
    (ranks)   while servers        each server separately, all while it generates

No server is paused, and no server can hold a mixture: an adapter has a name of its own, and requests name the one they
use. `sglang_plugin.PolicyAdapters` gives a request that names none the adapter of the server's version when it begins,
and reports that version for all of its tokens. So a request that runs during the switch ends with the adapter it began
with; with `sync.pause_mode=abort` it is aborted, and its response continues with the new one.

A server checks the bytes that it reads against the manifest of the version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from safetensors.torch import load_file, save_file

from megasync.errors import ServerError, SyncError
from megasync.files import atomic_write, fsync
from megasync.layout.adapter import AdapterLayout, adapter_config
from megasync.layout.shards import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megasync.serving.engine_protocol import POLICY_ADAPTER
from megasync.sync.attempt import Attempt
from megasync.sync.disk.sync import DiskServer, DiskSync, SealedVersion, in_phases
from megasync.sync.disk.version_folders import VersionFolders
from megasync.sync.messages import WrittenFile


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
        whole = draft / ADAPTER_WEIGHTS
        save_file(tensors, whole, metadata={"format": "pt"})
        fsync(whole)
        for name in files:
            (draft / name).unlink()
        config = adapter_config(layout.shape, str(self._source.resolve()))
        atomic_write(draft / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
        return {ADAPTER_WEIGHTS: WrittenFile(whole.stat().st_size, _digest(whole))}


class AdapterServer(DiskServer):
    """A server with megasync's plugin that serves adapters."""

    async def load(self, sealed: SealedVersion, attempt: Attempt) -> None:
        """Has all its ranks read the adapters, which nothing uses yet. Raises ServerError."""
        self.reading = sealed.path
        # A version that is published again has a folder of another name, and so have its adapters.
        name = POLICY_ADAPTER + sealed.path.name.removeprefix("v")
        try:
            await self.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(sealed.path)})
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

    async def _install(self, servers: Sequence[DiskServer], sealed: SealedVersion, attempt: Attempt) -> None:
        await in_phases(
            cast("Sequence[AdapterServer]", servers),
            attempt,
            ("load", lambda server: server.load(sealed, attempt)),
            ("switch", lambda server: server.switch(attempt)),
            ("verify", lambda server: server.confirm(attempt)),
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
