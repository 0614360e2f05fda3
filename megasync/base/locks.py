"""Locks on files, of the operating system (`flock`): a lock lives as long as its process, so a killed one leaves none.

The file's text only names the holder. The file stays, because a lock belongs to its inode.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megasync.base.files import open_regular

# A check whether a lock is held takes it for a moment; only a holder has it longer than this.
PATIENCE_SECONDS = 1.0
RETRY_SECONDS = 0.05
# Of a holder's name.
HOLDER_BYTES = 4096


class FileLock:
    """An exclusive lock, at most one in this process or any other, on this machine or one that shares the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self, **about: str) -> bool:
        """Returns whether this object has the lock; the file then names this process, and what `about` says of it.

        Raises OSError for a file that cannot be opened, and on a file system without locks.
        """
        if self._file is not None:
            return True
        file = self._path.open("a+")
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            while not _lock(file, fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    file.close()
                    return False
                time.sleep(RETRY_SECONDS)
        except BaseException:
            file.close()
            raise
        self._file = file
        # Unbuffered, and not needed for the lock: a full disk loses only the holder's name.
        with suppress(OSError):
            os.truncate(file.fileno(), 0)
            named = {"pid": os.getpid(), "host": socket.gethostname()} | about
            os.write(file.fileno(), json.dumps(named).encode())
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def holder_of(path: Path) -> dict[str, Any] | None:
    """The lock's present or last holder as {"pid", "host", ...}; None when there never was one."""
    try:
        with open_regular(path) as file:
            holder = json.loads(file.read(HOLDER_BYTES))
        return holder if isinstance(holder, dict) and {"pid", "host"} <= holder.keys() else None
    except (OSError, ValueError, RecursionError):
        return None


def named_holder(path: Path) -> str:
    """The holder of a lock for messages."""
    holder = holder_of(path)
    return f"process {holder['pid']} on {holder['host']}" if holder else "another process"


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock."""
    try:
        with open_regular(path) as file:
            return not _lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _lock(file: IO[Any], kind: int) -> bool:
    """Takes the lock if it is free. Returns whether it was."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
