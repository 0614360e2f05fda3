"""Checkpoints under `tinker://MODEL/weights/NAME`, `.../sampler_weights/NAME` and `.../external_weights/NAME`.

Those of the last kind are saved to be downloaded, and are samplers' otherwise. All are folders of the run:

    states/MODEL/SEQ          the state after request SEQ, of which a model needs the last
    checkpoints/MODEL/SEQ     what request SEQ of the model saved: a checkpoint, or the adapters of a sampler

A folder is named by the request that made it, never by a client, so no name leads out of the run's folder, nothing is
overwritten, and names of adapters never repeat. The record says what a folder is; one without a record was left by a
crash, and is removed when the service opens.
"""

from __future__ import annotations

import logging
import math
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megasync.base.files import remove_tree, sweep
from megasync.errors import DataError
from megasync.service.promises import Promises, drop_record, put_record
from megasync.service.records import Checkpoint, CheckpointKind
from megasync.service.requests import Unknown
from megasync.service.saved_files import Files

log = logging.getLogger(__name__)

STATES, SAVED = "states", "checkpoints"
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
# Seconds: an hour and ten years, as the protocol has it.
SHORTEST_TTL, LONGEST_TTL = 3600, 10 * 366 * 24 * 3600


def check_name(name: str) -> str:
    """Returns the name of a checkpoint. Raises DataError for one that is not allowed."""
    if not NAME.fullmatch(name):
        raise DataError(
            f"{name!r:.200} cannot name a checkpoint: use 1 to 128 letters, digits, '-', '_' and '.', and begin with a "
            f"letter, a digit or '_'"
        )
    return name


def check_ttl(seconds: int | None) -> None:
    """Raises DataError for a time to live that is not allowed."""
    if seconds is not None and not SHORTEST_TTL <= seconds <= LONGEST_TTL:
        raise DataError(
            f"a checkpoint cannot live for {seconds} s: give {SHORTEST_TTL} (an hour) to {LONGEST_TTL} s (ten years), "
            f"or none to keep it"
        )


def path_of(model: str, kind: CheckpointKind, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"


def adapter_of(model: str, seq: int) -> str:
    """The name of the adapter that a request saves."""
    return f"{file_name(model)}-{seq}"


def folder_of(adapter: str) -> str:
    """The folder of an adapter, relative to the run's."""
    model, _, seq = adapter.rpartition("-")
    return f"{SAVED}/{model}/{seq}"


def state_folder(model: str, seq: int) -> str:
    return f"{STATES}/{file_name(model)}/{seq}"


def file_name(model: str) -> str:
    return model.replace(":", "-")


def pieces(file: Path, size: int) -> Iterator[bytes]:
    """The content of a file, up to ``size`` bytes at once."""
    with file.open("rb") as opened:
        while piece := opened.read(size):
            yield piece


def tar_pieces(folder: Path, names: Iterable[str], size: int) -> Iterator[bytes]:
    """A tar file of `tar_bytes` bytes with files of a folder, which do not change, piece by piece."""
    for name in sorted(names):
        file = folder / name
        found = file.stat()
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime = found.st_size, found.st_mtime
        yield entry.tobuf(tarfile.GNU_FORMAT)
        yield from pieces(file, size)
        if rest := -found.st_size % tarfile.BLOCKSIZE:
            yield bytes(rest)
    yield bytes(2 * tarfile.BLOCKSIZE)


def tar_bytes(files: Files) -> int:
    blocks = sum(1 - -size // tarfile.BLOCKSIZE for size, _ in files.described.values())
    return (blocks + 2) * tarfile.BLOCKSIZE


def remove(folder: Path) -> None:
    """Removes a folder that nothing names anymore. What cannot be removed is left to the next opening."""
    try:
        remove_tree(folder)
    except FileNotFoundError:
        log.debug("%s was removed meanwhile", folder)
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error)


def holds_folders(run: Path) -> bool:
    """Whether there are states or something that was saved."""
    return any(any((run / kind).glob("*/*")) for kind in (STATES, SAVED))


def remove_others(run: Path, named: Iterable[str]) -> None:
    """Removes the folders of states and of what was saved that no record names."""
    needed = {run / name for name in named}
    for models in (run / STATES, run / SAVED):
        for model in models.iterdir() if models.is_dir() else ():
            sweep(model)
            for folder in model.iterdir():
                if folder not in needed:
                    remove(folder)


class Checkpoints:
    """The checkpoints of all tenants. ``dropped`` is called with each whose folder may go."""

    def __init__(
        self,
        run: Path,
        records: dict[str, Checkpoint],
        promises: Promises,
        clock: Callable[[], float],
        dropped: Callable[[Checkpoint], None],
    ) -> None:
        self._run = run
        self._records: dict[str, Checkpoint] = {}
        self._of_tenant: dict[str, dict[str, Checkpoint]] = {}
        self._of_model: dict[str, dict[str, Checkpoint]] = {}
        self._bytes = Counter[str]()
        self._promises = promises
        self._clock = clock
        self._dropped = dropped
        # The time before which none expires.
        self._expiry = math.inf
        for checkpoint in sorted(records.values(), key=lambda each: each.created):
            self.add(checkpoint)

    def of(self, tenant: str) -> list[Checkpoint]:
        """The tenant's checkpoints, newest first."""
        return [*reversed(self._of_tenant.get(tenant, {}).values())]

    def of_model(self, model: str) -> list[Checkpoint]:
        """The checkpoints of a model, newest first."""
        return [*reversed(self._of_model.get(model, {}).values())]

    def named(self, path: str) -> Checkpoint | None:
        return self._records.get(path)

    def number_of(self, tenant: str) -> int:
        return len(self._of_tenant.get(tenant, ()))

    def bytes_of(self, tenant: str) -> int:
        return self._bytes[tenant]

    def find(self, tenant: str, path: str, own: bool = False) -> Checkpoint:
        """The checkpoint, if it is the tenant's, or published and not ``own``. Raises Unknown, the same for both."""
        found = self._records.get(path)
        if found is None or (found.tenant != tenant and (own or not found.public)):
            raise Unknown(
                f"there is no checkpoint {path!r}; a path is {SCHEME}MODEL/weights/NAME or "
                f"{SCHEME}MODEL/sampler_weights/NAME, and must be one of your checkpoints or a published one"
            )
        return found

    def add(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Adds one whose record is written by the caller. Returns the one whose name it takes."""
        if (replaced := self._records.get(checkpoint.path)) is not None:
            self._remove(replaced)
        self._records[checkpoint.path] = checkpoint
        self._of_tenant.setdefault(checkpoint.tenant, {})[checkpoint.path] = checkpoint
        self._of_model.setdefault(checkpoint.model, {})[checkpoint.path] = checkpoint
        self._bytes[checkpoint.tenant] += checkpoint.files.size
        self._expiry = min(self._expiry, checkpoint.expires or math.inf)
        return replaced

    def _remove(self, checkpoint: Checkpoint) -> None:
        del self._records[checkpoint.path]
        for group, name in ((self._of_tenant, checkpoint.tenant), (self._of_model, checkpoint.model)):
            del group[name][checkpoint.path]
            if not group[name]:
                del group[name]
        self._bytes[checkpoint.tenant] -= checkpoint.files.size

    async def delete(self, tenant: str, path: str) -> None:
        self._delete(self.find(tenant, path, own=True))
        await self._promises.commit()

    async def set_ttl(self, tenant: str, path: str, seconds: int | None) -> None:
        found = self.find(tenant, path, own=True)
        check_ttl(seconds)
        found.expires = None if seconds is None else self._clock() + seconds
        self._expiry = min(self._expiry, found.expires or math.inf)
        await self._changed(found)

    async def publish(self, tenant: str, path: str, public: bool) -> None:
        found = self.find(tenant, path, own=True)
        found.public = public
        await self._changed(found)

    async def _changed(self, checkpoint: Checkpoint) -> None:
        await self._promises.commit(put_record("checkpoint", checkpoint.path, checkpoint))

    def delete_expired(self) -> None:
        now = self._clock()
        if now < self._expiry:
            return
        for each in [c for c in self._records.values() if c.expires is not None and c.expires <= now]:
            log.info("Checkpoint %s has expired", each.path)
            self._delete(each)
        self._expiry = min((each.expires for each in self._records.values() if each.expires), default=math.inf)

    def folder(self, checkpoint: Checkpoint) -> Path:
        return self._run / folder_of(checkpoint.adapter)

    def _delete(self, checkpoint: Checkpoint) -> None:
        """Drops the folder first: on a full disk nothing could be recorded before. Deleting may be repeated."""
        self._remove(checkpoint)
        self._dropped(checkpoint)
        self._promises.record(drop_record("checkpoint", checkpoint.path))
