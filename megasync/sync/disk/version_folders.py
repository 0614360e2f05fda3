"""The versions of a run in a shared folder. A folder gets its final name last, so under that name it is complete.

    v7.incomplete ── ranks write ──▶ seal: sizes, index, config, manifest, fsync, rename ──▶ v7 ──▶ pruned

Each sealed version is a complete Hugging Face folder, so a server may also be started from it.

Invariant: one process at a time writes to the folder and removes from it, because only it knows which versions are
being written or read. The lock that `prepare` takes guarantees it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from megasync.base.files import atomic_write, durable_rename, fsync, remove_tree, sweep
from megasync.base.locks import FileLock, named_holder
from megasync.errors import SyncError, raised_as
from megasync.layout.shards import INDEX, index_text, part_name, write_companions
from megasync.serving.plugin_protocol import MANIFEST
from megasync.sync.broadcast.plan import BroadcastPlan
from megasync.sync.messages import WrittenFile

log = logging.getLogger(__name__)

LOCK = ".lock"
_DRAFT = ".incomplete"
# A version that is written again gets another name: a server may still be reading the first folder.
_SEALED = re.compile(r"v[0-9]+(\.[0-9]+)?")
_UNSEALED = re.compile(_SEALED.pattern + re.escape(_DRAFT))


class VersionFolders:
    """All methods block on the disk.

    Args:
        root: the shared folder, created when it is missing.
        source: Hugging Face folder with the model's config.json and tokenizer.
        keep: sealed versions that `prune` leaves.
    """

    def __init__(self, root: Path, source: Path, plan: BroadcastPlan, keep: int) -> None:
        self.root = root.expanduser().absolute()
        self._source = source
        self._plan = plan
        self._keep = keep
        self._lock = FileLock(self.root / LOCK)

    def prepare(self) -> None:
        """Creates the root, locks it until `close`, and removes what an earlier process left unfinished.

        Raises SyncError, also while another run has the folder.
        """
        with raised_as(SyncError, f"sync.disk_dir={self.root} cannot be created"):
            self.root.mkdir(parents=True, exist_ok=True)
        try:
            free = self._lock.take()
        except OSError as error:
            log.warning("sync.disk_dir=%s cannot be locked (%s): let no other run use it", self.root, error)
            free = True
        if not free:
            raise SyncError(
                f"sync.disk_dir={self.root} is in use by the run of {named_holder(self.root / LOCK)}; give each run a "
                f"folder of its own"
            )
        sweep(self.root)
        for stale in self._named(_UNSEALED):
            self.discard(stale)

    def close(self) -> None:
        """Lets another run use the folder."""
        self._lock.release()

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        return [path for path in self.root.iterdir() if pattern.fullmatch(path.name)]

    def draft(self, version: int) -> Path:
        """An empty folder to write a version into. Raises SyncError."""
        with raised_as(SyncError, f"no version can be written to sync.disk_dir={self.root}"):
            names = (f"v{version}" + (f".{again}" if again else "") for again in count())
            free = next(name for name in names if not (self.root / name).exists())
            draft = self.root / (free + _DRAFT)
            draft.mkdir()
        return draft

    def seal(self, draft: Path, version: int, files: Mapping[str, WrittenFile]) -> Path:
        """Completes a draft, whose weight ``files`` the ranks wrote, and gives it its final name.

        Raises SyncError when a file is missing or has another size here than its rank says, or the disk is full.
        """
        expected = {part_name(i, len(self._plan.buckets)) for i in range(len(self._plan.buckets))}
        if files.keys() != expected:
            raise SyncError(f"the ranks wrote {sorted(files)} into {draft}, but the plan says {sorted(expected)}")
        with raised_as(SyncError, f"{draft} cannot be completed"):
            for name, written in files.items():
                path = draft / name
                if (size := path.stat().st_size if path.exists() else None) != written.bytes:
                    raise SyncError(
                        f"{path} has {size} bytes here, but {written.bytes} on the rank that wrote it: sync.disk_dir "
                        f"must be one folder that all nodes share"
                    )
            complete = self._complete(draft, files)
            manifest = {
                "version": version,
                "dtype": self._plan.dtype,
                "files": {name: msgspec.to_builtins(complete[name]) for name in sorted(complete)},
            }
            atomic_write(draft / MANIFEST, json.dumps(manifest, indent=2))
            for path in draft.iterdir():
                if path.name not in files:
                    fsync(path)
            fsync(draft)
            sealed = draft.with_name(draft.name.removesuffix(_DRAFT))
            durable_rename(draft, sealed)
        return sealed

    def _complete(self, draft: Path, files: Mapping[str, WrittenFile]) -> Mapping[str, WrittenFile]:
        """Writes what the folder has besides the files of the ranks; returns its weight files."""
        write_companions(self._source, draft, self._plan.dtype, self._plan.layout)
        where = {
            entry.name: part_name(index, len(self._plan.buckets))
            for index, bucket in enumerate(self._plan.buckets)
            for entry in bucket.tensors
        }
        atomic_write(draft / INDEX, index_text(where, self._plan.nbytes))
        return files

    def discard(self, draft: Path) -> None:
        """Removes a version or draft as far as possible; its name goes first, so that nothing uses the rest."""
        with suppress(OSError):
            remove_tree(draft)

    def prune(self, busy: Collection[Path]) -> None:
        """Removes the oldest sealed versions beyond ``keep``, except those that are ``busy``."""
        sealed = [path for path in self._named(_SEALED) if (path / MANIFEST).is_file()]
        sealed.sort(key=lambda path: (path / MANIFEST).stat().st_mtime_ns)
        for path in sealed[: -self._keep]:
            if path not in busy:
                self.discard(path)
