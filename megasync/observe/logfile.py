"""One log file per process, under the run directory."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LogFile(logging.FileHandler):
    """Says once, on standard error, that it cannot be written; a full disk must neither end a run nor flood its screen."""

    _said = False
    _before: tuple[int, bool] | None = None

    def attach(self, level: int) -> None:
        logger = logging.getLogger("megasync")
        self._before = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(level)
        # Warnings reach the screen through the display; a root handler would print everything a second time.
        logger.propagate = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            print(f"WARNING could not write the log {self.baseFilename}: {error}", file=sys.stderr)

    def close(self) -> None:
        if self._before is not None:
            logger = logging.getLogger("megasync")
            logger.removeHandler(self)
            logger.setLevel(self._before[0])
            logger.propagate = self._before[1]
            self._before = None
        # What could not be written before is tried once more here, and was spoken of before.
        with contextlib.suppress(OSError):
            super().close()


def log_to_file(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Sends this process's log records to `path` until the returned handler is closed; then the logger is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.attach(level)
    return handler
