"""The files of a folder as the record has them, by which another model's, older and damaged ones are noticed.

The files of a state, and of what was saved, never change. Their digests are recorded together with the folder's name,
once they are durable. Whoever uses the files compares them first (`check_files`): before ranks load them, before
servers or clients get them, and before they get further names. So a folder that was exchanged, or restored from another
time, is refused, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64

from megasync.concurrency.first_use import prepared
from megasync.errors import CheckpointError

# Bytes that are read at once.
_PIECE = 1 << 20


@prepared
@dataclass(frozen=True, slots=True)
class Files:
    """Files of one folder: the bytes and the digest (XXH3) of each, by its name."""

    described: Mapping[str, tuple[int, bytes]] = field(default_factory=dict[str, tuple[int, bytes]])

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.described.values())

    def without(self, left_out: str) -> Files:
        return Files({name: each for name, each in self.described.items() if name != left_out})


def read_files(folder: Path) -> Files:
    """Describes what a folder has. Raises OSError."""
    return Files({name: _described(folder / name) for name in _names(folder)})


def check_files(folder: Path, recorded: Files, others: Collection[str] = ()) -> None:
    """Raises CheckpointError unless a folder has the recorded files, and none but ``others`` beside them; OSError too.

    Messages are for clients, so they name what is wrong by the end of its path and do not say whose it is.
    """
    where = "/".join(folder.parts[-3:])
    fix = "restore the folder `service` as a whole, from one copy"
    present = _names(folder)
    if missing := sorted(recorded.described.keys() - present):
        raise CheckpointError(f"{where}/{missing[0]} is missing; {fix}")
    if unknown := sorted(present - recorded.described.keys() - {*others}):
        raise CheckpointError(f"{where}/{unknown[0]} was not written by the service; remove it, or {fix}")
    for name, (size, digest) in recorded.described.items():
        file = folder / name
        if file.stat().st_size != size or _described(file)[1] != digest:
            raise CheckpointError(
                f"{where}/{name} is not the file that the service wrote there, but another model's, an older one, or "
                f"damaged; {fix}"
            )


def _names(folder: Path) -> set[str]:
    """The names of a folder's files, without hidden ones, which file systems add and nothing reads."""
    return {file.name for file in folder.iterdir() if not file.name.startswith(".")}


def _described(file: Path) -> tuple[int, bytes]:
    digest, size, piece = xxh3_64(), 0, memoryview(bytearray(_PIECE))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            digest.update(piece[:count])
            size += count
    return size, digest.digest()
