"""Atomic, durable file writes: after a crash of the process or the machine a file has its old or its new content.

    write a temporary file next to NAME ─▶ fsync ─▶ rename it over NAME ─▶ fsync the folder

A failure before the rename leaves the old file untouched, and `atomic_write` removes the temporary file. A killed
process leaves at most one hidden file, `.NAME.<random>.part`, which nothing reads.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PART = ".part"


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Replaces a file durably; text is encoded as UTF-8. If `path` is a symbolic link, its target is replaced.

    On failure, raises OSError and leaves the old file untouched.
    """
    path = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PART}")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    fsync(path.parent)


def durable_rename(draft: Path, path: Path) -> None:
    """Renames a file or folder durably. Its content must already be flushed to disk with `fsync`."""
    os.replace(draft, path)
    fsync(path.parent)


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a file of somebody else for reading. Raises OSError for what is no regular file.

    A named pipe would block, a device might never end.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def fsync(path: str | Path) -> None:
    """Flushes a file, or the entries of a folder, to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot fsync a folder; their servers store its entries durably.
        if error.errno != errno.EINVAL or not os.path.isdir(path):
            raise
    finally:
        os.close(handle)


def fdatasync(path: str | Path) -> None:
    """Flushes a file's content to disk, and of its metadata only what reading it takes. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Flushes a folder and everything below it to disk. Raises OSError."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)
