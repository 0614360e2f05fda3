"""Atomic, durable file writes: after a crash of the process or the machine a file has its old or its new content.

    write a temporary file next to NAME ─▶ fsync ─▶ rename it over NAME ─▶ fsync the folder

A failure before the rename leaves the old file untouched, and `atomic_write` removes the temporary file. A killed
process leaves at most one hidden file, `.NAME.<random>.part`, which nothing reads.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PART = ".part"
# Bytes of a Unix socket's path on Linux, and what a run's processes add to the temporary folder at most: Ray, with its
# session's folder and `sockets/plasma_store`.
SOCKET_PATH_BYTES, SOCKET_NAME_BYTES = 107, 72
# Short folders that every Linux has.
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def socket_folder(wanted: str = "") -> str:
    """Where processes of a run keep their Unix sockets: ``wanted`` or else the temporary folder, if its path is short.

    Batch schedulers set TMPDIR to paths so long that no socket can be bound there. Then it is the first short folder
    that can be written; without one, the long one all the same.
    """
    first = wanted or tempfile.gettempdir()
    for folder in (first, *_SHORT_FOLDERS):
        if leaves_room_for_sockets(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return first


def ray_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Additions to an environment with which Ray keeps its sockets in a folder that has room for their paths."""
    wanted = env.get("RAY_TMPDIR") or env.get("TMPDIR") or _SHORT_FOLDERS[0]
    folder = socket_folder(wanted)
    return {} if folder == wanted else {"RAY_TMPDIR": folder}


def leaves_room_for_sockets(folder: str) -> bool:
    return len(os.fsencode(os.path.abspath(folder))) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES


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


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, whose text begins with the path, for whatever is wrong with it."""
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold one JSON object, not a {type(content).__name__}")
    return content


def durable_rename(draft: Path, path: Path) -> None:
    """Renames a file or folder durably. Its content must already be flushed to disk with `fsync`."""
    os.replace(draft, path)
    fsync(path.parent)


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
