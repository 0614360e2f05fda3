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

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            print(f"WARNING could not write the log {self.baseFilename}: {error}", file=sys.stderr)

    def close(self) -> None:
        # What could not be written before is tried once more here, and was spoken of before.
        with contextlib.suppress(OSError):
            super().close()


def log_to_file(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Sends this process's log records to `path` from now on; returns the handler, to be removed by the caller."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger("megasync")
    logger.addHandler(handler)
    logger.setLevel(level)
    # Warnings reach the screen through the display; a root handler would print everything a second time.
    logger.propagate = False
    return handler
