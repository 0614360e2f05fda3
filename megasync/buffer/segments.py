"""Append-only files with the bodies of groups: each process that makes groups writes its own, and any may read them.

A segment ends when it has reached its size; a restarted writer begins a new one. Nothing in a segment is ever changed,
so a body that was written stays readable until its whole segment is removed. Bytes that no row of the ledger names,
such as the end of a write that was cut short, are never read.

A body reaches its segment before a row of the ledger names it: a rollout worker writes it before it hands over its
place, the driver in the transaction of the row (`ledger`).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megasync.base.files import fsync
from megasync.buffer.payload import (
    EncodedGroup,
    EncodedPartial,
    LeasedGroup,
    StoredBody,
    decode,
    decode_trajectories,
    parts_of,
)
from megasync.concurrency.batches import Batches, Run
from megasync.errors import DataError, LedgerError, raised_as
from megasync.trajectory import Group, Trajectory

SUFFIX = ".seg"
_NAME = re.compile(rf"((.+)-([0-9]{{8}}|[1-9][0-9]{{8,}})){re.escape(SUFFIX)}")
# Bytes after which a segment ends: a run holds a few of them, and one straggler keeps at most this much on disk.
SEGMENT_BYTES = 64 * 2**20
# Pieces that one call writes: Linux takes no more.
MOST_PIECES = 1024
# The writer of what the driver's own process makes.
DRIVER = "driver"
# The fix when a disk fails or is full.
CONTENT_INTACT = "its content is intact: check the disk, then continue with `megasync resume`"


class Segment(NamedTuple):
    """A segment's name, without suffix."""

    name: str
    writer: str
    number: int


class SegmentWriter:
    """Appends bodies to a segment of ``writer`` in ``folder``. Every method raises OSError.

    `reserve` and `write` may belong to two threads, if bodies are written in the order of their places.
    """

    def __init__(self, folder: Path, writer: str = DRIVER, segment_bytes: int = SEGMENT_BYTES) -> None:
        # Readers have other working directories.
        self._folder = folder.absolute()
        self._writer = writer
        self._limit = segment_bytes
        # The segment that is reserved from: its number, and the bytes that are taken; then the one that is written.
        self._number, self._path, self._size = 0, "", segment_bytes
        self._file: int | None = None
        self._written = ""
        # Whether something was written since the last `sync`.
        self._unsynced = False

    def reserve(self, size: int) -> StoredBody:
        """Where the next body, of ``size`` bytes, will lie."""
        if self._size >= self._limit:
            present = [each.number for each in segments_in(self._folder) if each.writer == self._writer]
            self._number, self._size = max([self._number, *present]) + 1, 0
            self._path = str(segment_path(self._folder, f"{self._writer}-{self._number:08d}"))
        place = StoredBody(self._path, self._size)
        self._size += size
        return place

    def append(self, pieces: Sequence[Any]) -> StoredBody:
        """Writes a body, of bytes and arrays, at the next place."""
        place = self.reserve(sum(memoryview(piece).nbytes for piece in pieces))
        self.write(place, pieces)
        return place

    def write(self, place: StoredBody, pieces: Sequence[Any]) -> None:
        """Writes a body, of bytes and arrays, at its reserved place. A place may stay empty."""
        if self._file is None or self._written != place.path:
            self._begin(place.path)
        assert self._file is not None
        at = place.offset
        while pieces:
            # At the recorded place, also where the file is shorter than it should be.
            written = os.pwritev(self._file, pieces[:MOST_PIECES], at)
            at += written
            pieces = _without(pieces, written)
        self._unsynced = True

    def sync(self) -> None:
        """Everything written survives a power loss, and other machines on a network file system can read it."""
        if self._unsynced and self._file is not None:
            os.fdatasync(self._file)
            self._unsynced = False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self, path: str) -> None:
        self.sync()
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._written = path
        fsync(self._folder)


class BodyWriter:
    """Appends the bodies of the groups that a rollout worker makes, on a thread, several at a time.

    With ``shared`` other machines read them, so each is flushed to the file system before its place is known. ``run``
    replaces the thread.
    """

    def __init__(self, folder: Path, writer: str, shared: bool = False, run: Run | None = None) -> None:
        self._folder = folder
        self._segments = SegmentWriter(folder, writer)
        self._shared = shared
        self._batches = Batches(self._appending, f"bodies of {writer}", run)

    async def store(self, group: EncodedGroup) -> EncodedGroup:
        """The group with the place of its body, which survives the death of any process. Raises LedgerError."""
        if group.place is not None:
            return group
        return group.stored(await self._batches.put(group.pieces))

    async def close(self) -> None:
        await self._batches.close()
        self._segments.close()

    def _appending(self, bodies: list[Sequence[Any]]) -> Callable[[], list[StoredBody]]:
        return partial(self._append, bodies)

    def _append(self, bodies: list[Sequence[Any]]) -> list[StoredBody]:
        with raised_as(LedgerError, f"{self._folder} cannot be written", CONTENT_INTACT):
            places = [self._segments.append(body) for body in bodies]
            if self._shared:
                self._segments.sync()
        return places


def _without(pieces: Sequence[Any], size: int) -> Sequence[Any]:
    """The pieces without their first ``size`` bytes."""
    for at, piece in enumerate(pieces):
        view = memoryview(piece)
        if size < view.nbytes:
            return [view.cast("B")[size:], *pieces[at + 1 :]]
        size -= view.nbytes
    return ()


def segments_of(ledger: Path) -> Path:
    """The folder with the segments of a ledger."""
    return ledger.with_suffix(".segments")


def segments_in(folder: Path) -> list[Segment]:
    """All segments in the folder, in the order of their names."""
    if not folder.is_dir():
        return []
    names = (_NAME.fullmatch(name) for name in sorted(os.listdir(folder)))
    return [Segment(name[1], name[2], int(name[3])) for name in names if name]


def segment_path(folder: Path, name: str) -> Path:
    return folder / f"{name}{SUFFIX}"


def segment_name(body: StoredBody) -> str:
    return os.path.basename(body.path).removesuffix(SUFFIX)


def load(group: LeasedGroup) -> Group:
    """A leased group with its tokens, read from where its body lies. Raises DataError, which names the cause."""
    with _naming(group):
        return decode(group.header, _read(group, [(0, group.header.body_bytes)]))


def load_trajectories(group: LeasedGroup, places: Sequence[int]) -> list[Trajectory]:
    """Some trajectories of a leased group, by their positions in its header. Reads nothing else of the body.

    Raises DataError, which names the cause.
    """
    headers = [group.header.trajectories[place] for place in places]
    with _naming(group):
        return decode_trajectories(headers, _read(group, {part for header in headers for part in parts_of(header)}))


def _read(group: LeasedGroup, parts: Iterable[tuple[int, int]]) -> bytes | memoryview:
    """The body, of which only some parts are read; memory that nothing is written to takes none."""
    place = group.body
    if not isinstance(place, StoredBody):
        return place
    body = np.empty(group.header.body_bytes, np.uint8).data
    file = os.open(place.path, os.O_RDONLY)
    try:
        for at, size in parts:
            if os.preadv(file, [body[at : at + size]], place.offset + at) < size:
                raise ValueError(f"{place.path} is cut short")
    finally:
        os.close(file)
    return body


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


# The calls that `ask` takes.
CALLS = ("commit", "drop", "partials", "save_partials")


class GroupSink:
    """The buffer as makers of groups see it, in the driver or elsewhere: it takes groups, as `TrajectoryBuffer` does.

    See there for what each call means and raises. A body goes to a segment of the process that made the group. What
    reaches the driver as a message is a header with the place of its body.

    ``ask(call, *arguments)`` returns the driver's answer to one of `CALLS`. ``bodies`` is the writer of this process;
    without one, the driver takes the body too.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], bodies: BodyWriter | None = None) -> None:
        self._ask = ask
        self._bodies = bodies

    async def commit(self, group: EncodedGroup) -> bool:
        return await self._ask("commit", group if self._bodies is None else await self._bodies.store(group))

    async def drop(self, uid: str, reason: str) -> bool:
        return await self._ask("drop", uid, reason)

    async def partials(self, uid: str) -> dict[tuple[int, int], bytes]:
        return await self._ask("partials", uid)

    async def save_partials(self, partials: dict[tuple[str, int, int], EncodedPartial]) -> None:
        await self._ask("save_partials", partials)
