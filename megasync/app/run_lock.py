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
            raise _refused(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def refuse_running(run_dir: Path) -> None:
    """Raises ConfigError, naming the holder, while another process drives the run, which may remove what is read."""
    if is_held(run_dir):
        raise _refused(Path(run_dir) / FILE)


def _refused(path: Path) -> ConfigError:
    return ConfigError(f"{path.parent} is being run by {named_holder(path)}; wait for it to end, or end it")


def holder(run_dir: Path) -> dict[str, Any] | None:
    """The run's current or last driver as {"pid", "host"}; None when there never was one."""
    return holder_of(Path(run_dir) / FILE)


def is_held(run_dir: Path) -> bool:
    """Whether a driver is alive."""
    return is_locked(Path(run_dir) / FILE)
