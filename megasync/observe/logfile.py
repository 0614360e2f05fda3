"""One log file per process, in the run directory."""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LogFile(logging.FileHandler):
    """A log file that reports a failed write once, on stderr: a full disk must not end a run or flood the terminal."""

    _reported = False
    _saved: tuple[int, bool] | None = None

    def attach(self) -> None:
        logger = logging.getLogger("megasync")
        self._saved = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        # The display prints warnings; a root handler would print everything a second time.
        logger.propagate = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            print(f"WARNING could not write the log {self.baseFilename}: {error}", file=sys.stderr)

    def close(self) -> None:
        if self._saved is not None:
            logger = logging.getLogger("megasync")
            logger.removeHandler(self)
            logger.setLevel(self._saved[0])
            logger.propagate = self._saved[1]
            self._saved = None
        # Retries the records that could not be written; that failure was reported before.
        with contextlib.suppress(OSError):
            super().close()


def log_to_file(path: Path) -> logging.Handler:
    """Writes this process's log records to `path` until the returned handler is closed, which restores the logger."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.attach()
    return handler


def log_folder() -> Path:
    """The folder of this process's log file; without one, the system's folder for temporary files."""
    files = [handler for handler in logging.getLogger("megasync").handlers if isinstance(handler, _LogFile)]
    return Path(files[-1].baseFilename).parent if files else Path(tempfile.gettempdir())
