"""Atomic, durable writes and removals: after a crash of the process or the machine a name has its old or new content.

    file      write .NAME.<random>.part ─▶ fsync ─▶ rename it over NAME ─▶ fsync the parent folder
    folder    write .NAME.<random>.part/ ─▶ fsync all of it ─▶ rename it to NAME ─▶ fsync the parent folder
    removal   rename NAME to .NAME.<random>.removed ─▶ fsync the parent folder ─▶ delete

A failure before the rename leaves the old content untouched, and removes the new one. A killed process leaves at most
one hidden name, which nothing reads. `new_folder` and `sweep` remove what killed processes have left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PART = ".part"
_REMOVED = ".removed"
_RANDOM = "[0-9a-f]{8}"
# Of files that only the user who runs the process may read.
PRIVATE = 0o600
# Bytes of a Unix socket's path on Linux, and what a run's processes add to the temporary folder at most: Ray, with its
# session's folder and `sockets/plasma_store`.
SOCKET_PATH_BYTES, SOCKET_NAME_BYTES = 107, 72
# Short folders that every Linux has.
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def bytes_text(count: int) -> str:
    """A human-readable number of bytes, in powers of 1,000."""
    return scaled(count, (" GB", " MB", " kB"), " B")


def scaled(count: int, units: tuple[str, str, str], one: str) -> str:
    """A number in units of 10**9, 10**6 or 10**3, or of ``one``."""
    for power, unit in zip((9, 6, 3), units, strict=True):
        if count >= 10**power:
            return f"{count / 10**power:.1f}{unit}"
    return f"{count}{one}"


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


def home(otherwise: str = "") -> Path:
    """The home folder of this user, who may have none where containers run under any number.

    Then it is `otherwise`, by default the temporary folder.
    """
    folder = os.path.expanduser("~")
    return Path((otherwise or tempfile.gettempdir()) if folder == "~" else folder)


def ray_token_file(env: Mapping[str, str]) -> Path:
    """The file in which Ray keeps the token of this user's clusters."""
    return Path(env.get("RAY_AUTH_TOKEN_PATH") or home("/") / ".ray" / "auth_token")


def ray_token(env: Mapping[str, str]) -> dict[str, str]:
    """Additions to an environment with which a cluster that is started here has a token where none can be saved."""
    file = ray_token_file(env)
    if env.get("RAY_AUTH_TOKEN") or os.path.isfile(file) or writable(file.parent):
        return {}
    return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def writable(path: Path) -> bool:
    """Whether the folder can be written or created."""
    present = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
    return os.path.isdir(present) and os.access(present, os.W_OK)


def leaves_room_for_sockets(folder: str) -> bool:
    return len(os.fsencode(os.path.abspath(folder))) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES


def atomic_write(path: str | Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replaces a file durably; text is encoded as UTF-8. If `path` is a symbolic link, its target is replaced.

    The file gets `mode` without the bits of the umask. On failure, raises OSError and leaves the old file untouched.
    """
    path = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    part = _hidden(path, PART)
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    fsync(path.parent)


@contextmanager
def new_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Gives a draft to write a folder into, which gets its name, durably, at the end of the block.

    An empty folder of that name is replaced, with `replace` any folder. Files get the mode that the umask gives to new
    ones. If the block raises, the draft is removed, and `path` is as before. Raises OSError.
    """
    _sweep(path.parent, rf"\.{re.escape(path.name)}\.{_RANDOM}({re.escape(PART)}|{re.escape(_REMOVED)})")
    draft = _hidden(path, PART)
    draft.mkdir(parents=True)
    # Held until the process ends: the lock tells a draft in the making from one that was left behind.
    handle = os.open(draft, os.O_RDONLY)
    try:
        _lock(handle)
        yield draft
        mode = draft.stat().st_mode & 0o666
        for file in draft.rglob("*"):
            # Libraries, such as safetensors, write files that only their user may read.
            if file.is_file() and not file.is_symlink():
                file.chmod(mode)
        fsync_tree(draft)
        old = _hidden(path, _REMOVED)
        if replace and path.exists():
            durable_rename(path, old)
        # Replaces an empty folder, and fails for any other.
        durable_rename(draft, path)
        _delete(old)
    finally:
        os.close(handle)
        shutil.rmtree(draft, ignore_errors=True)


def remove_tree(path: Path) -> None:
    """Removes a folder with all that it holds; a symbolic link is removed, not what it points to.

    Its name goes first, durably, so a killed process never leaves a part of the folder under its name. Raises OSError,
    also FileNotFoundError, if the name cannot be removed; what then cannot be deleted is left for `sweep`.
    """
    doomed = _hidden(path, _REMOVED)
    durable_rename(path, doomed)
    _delete(doomed)


def sweep(folder: Path) -> None:
    """Deletes what killed processes have left of removed folders in ``folder``."""
    _sweep(folder, rf"\..+\.{_RANDOM}{re.escape(_REMOVED)}")


def _sweep(folder: Path, names: str) -> None:
    """Deletes everything in ``folder`` with such a name, except drafts whose writers live."""
    try:
        left = [path for path in folder.iterdir() if re.fullmatch(names, path.name, re.DOTALL)]
    except OSError:
        return
    for path in left:
        if path.is_symlink():
            _delete(path)
            continue
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if _lock(handle):
                    _delete(path)
            finally:
                os.close(handle)


def _lock(handle: int) -> bool:
    """Locks an open file or folder; False if another process has, or the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _hidden(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{suffix}")


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
