"""One driver per run directory: a second one would train the same groups again and overwrite the first one's
checkpoints.

The lock is the operating system's (`flock`) and lives as long as the process, so a killed driver leaves none behind.
The file's text only names the holder.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from megasync.errors import ConfigError
from megasync.files import open_regular

FILE = "driver.lock"
# A check whether the lock is held takes it for a moment; only a driver holds it longer than this.
PATIENCE_SECONDS = 1.0
RETRY_SECONDS = 0.05


class RunLock:
    """Context manager. Raises ConfigError, naming the holder, when another process drives the run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = Path(run_dir) / FILE
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        file = self._path.open("a+")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                file.close()
                driver = holder(self._path.parent)
                name = f"process {driver['pid']} on {driver['host']}" if driver else "another process"
                raise ConfigError(f"{self._path.parent} is being run by {name}; wait for it to end, or end it")
            time.sleep(RETRY_SECONDS)
        self._file = file
        # Unbuffered, and not needed for the lock: a full disk loses only the holder's name.
        with suppress(OSError):
            os.truncate(file.fileno(), 0)
            os.write(file.fileno(), json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def holder(run_dir: Path) -> dict | None:
    """The run's current or last driver as {"pid", "host"}; None when there never was one."""
    try:
        return json.loads((Path(run_dir) / FILE).read_text())
    except (OSError, ValueError):
        return None


def is_held(run_dir: Path) -> bool:
    """Whether a driver is alive."""
    try:
        with open_regular(Path(run_dir) / FILE) as file:
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
