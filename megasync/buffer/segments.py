"""Append-only files with the bodies of groups. One process writes them; any process that sees the folder may read.

A segment ends when it has reached its size; a restarted writer begins a new one. Nothing in a segment is ever changed,
so a body that was written stays readable until its whole segment is removed. Bytes that no row of the ledger names,
such as the end of a write that was cut short, are never read.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megasync.base.files import fdatasync, fsync
from megasync.buffer.payload import (
    Body,
    LeasedGroup,
    StoredBody,
    check_body,
    check_parts,
    decode,
    decode_trajectory,
    parts_of,
)
from megasync.errors import DataError
from megasync.trajectory import Group, Trajectory

SUFFIX = ".seg"
_NAME = re.compile(rf"([0-9]{{8}}|[1-9][0-9]{{8,}}){re.escape(SUFFIX)}")
# Bytes after which a segment ends: a run holds a few of them, and one straggler keeps at most this much on disk.
SEGMENT_BYTES = 64 * 2**20


class SegmentWriter:
    """Appends bodies to the newest segment in ``folder``. Every method raises OSError."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._limit = segment_bytes
        self._file: int | None = None
        self._number = max(self.present(), default=0)
        self._size = 0
        # Whether something was appended since the last `sync`.
        self._unsynced = False

    def present(self) -> list[int]:
        """The numbers of all segments in the folder."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(name) for name in os.listdir(self._folder))
        return sorted(int(name[1]) for name in found if name)

    def append(self, body: bytes | memoryview) -> StoredBody:
        if self._file is None or self._size >= self._limit:
            self._begin()
        assert self._file is not None
        offset, view = self._size, memoryview(body).cast("B")
        while view:
            # At the recorded place, also where the file is shorter than it should be.
            written = os.pwrite(self._file, view, self._size)
            self._size += written
            view = view[written:]
        self._unsynced = True
        return StoredBody(str(segment_path(self._folder, self._number)), offset)

    def sync(self) -> None:
        """Everything appended survives a power loss, and other machines on a network file system can read it."""
        if self._unsynced and self._file is not None:
            os.fdatasync(self._file)
            self._unsynced = False

    def flush(self) -> None:
        """As `sync`, on any thread while this one appends."""
        number = self._number if self._file is not None else None
        if number is None or not self._unsynced:
            return
        # First, because what is appended from now on may miss this flush. A segment that ended meanwhile was synced.
        self._unsynced = False
        with suppress(FileNotFoundError):
            fdatasync(segment_path(self._folder, number))

    def without(self, needed: Iterable[int]) -> list[Path]:
        """All segments but these and the one that is being written."""
        keep = {*needed, self._number} if self._file is not None else set(needed)
        return [segment_path(self._folder, number) for number in self.present() if number not in keep]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        self.sync()
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = os.open(segment_path(self._folder, self._number + 1), flags, 0o644)
        self._number += 1
        self._size = 0
        fsync(self._folder)


def segments_of(ledger: Path) -> Path:
    """The folder with the segments of a ledger."""
    return ledger.with_suffix(".segments")


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{SUFFIX}"


def segment_number(body: StoredBody) -> int:
    return int(Path(body.path).stem)


def load(group: LeasedGroup) -> Group:
    """A leased group with its tokens, read from where its body lies. Raises DataError, which names the cause."""
    with _naming(group):
        return decode(group.header, read_body(group))


def load_trajectories(group: LeasedGroup, places: Sequence[int]) -> list[Trajectory]:
    """Some trajectories of a leased group, by their positions in its header. Reads nothing else of the body.

    Raises DataError, which names the cause.
    """
    with _naming(group), _opened(group.body) as read:
        prompts: dict[int, bytes | memoryview] = {}
        loaded: list[Trajectory] = []
        for header in (group.header.trajectories[place] for place in places):
            (at, size), own_part = parts_of(header)
            if at not in prompts:
                prompts[at] = read(at, size)
            prompt, own = prompts[at], read(*own_part)
            check_parts(header, prompt, own)
            loaded.append(decode_trajectory(header, prompt, own))
        return loaded


@contextmanager
def _opened(body: Body) -> Generator[Callable[[int, int], bytes | memoryview]]:
    """A function that returns ``size`` bytes of a body from ``at`` on."""
    if not isinstance(body, StoredBody):
        view = memoryview(body)
        yield lambda at, size: view[at : at + size]
        return
    file = os.open(body.path, os.O_RDONLY)
    try:
        yield lambda at, size: os.pread(file, size, body.offset + at)
    finally:
        os.close(file)


@contextmanager
def _naming(group: LeasedGroup) -> Generator[None]:
    """Turns errors of reading a group into a DataError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(
            f"group {group.uid} cannot be read on {socket.gethostname()}: {error}; the run directory must lie on a "
            f"file system that all nodes share (run_root)"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"group {group.uid} cannot be read: {error}") from error


def read_body(group: LeasedGroup) -> bytes | memoryview:
    """The body, wherever it lies. Raises OSError, and ValueError when it is not the one that was encoded."""
    with _opened(group.body) as read:
        body = read(0, group.header.body_bytes)
    check_body(group.header, body)
    return body
