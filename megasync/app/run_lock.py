"""One driver per run directory: a second one would train the same groups again and overwrite the first one's
checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megasync.base.locks import FileLock, holder_of, is_locked, named_holder
from megasync.errors import ConfigError

FILE = "driver.lock"


class RunLock:
    """Context manager. Raises ConfigError, naming the holder, when another process drives the run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = Path(run_dir) / FILE
        self._lock = FileLock(self._path)

    def __enter__(self) -> Self:
        if not self._lock.take():
            name = named_holder(self._path)
            raise ConfigError(f"{self._path.parent} is being run by {name}; wait for it to end, or end it")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def holder(run_dir: Path) -> dict[str, Any] | None:
    """The run's current or last driver as {"pid", "host"}; None when there never was one."""
    return holder_of(Path(run_dir) / FILE)


def is_held(run_dir: Path) -> bool:
    """Whether a driver is alive."""
    return is_locked(Path(run_dir) / FILE)
