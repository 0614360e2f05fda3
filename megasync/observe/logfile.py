"""One log file per process, under the run directory."""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_file(path: Path, level: int = logging.INFO) -> logging.Handler:
    """Sends this process's log records to `path` from now on; returns the handler, to be removed by the caller."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger("megasync")
    logger.addHandler(handler)
    logger.setLevel(level)
    # Warnings reach the screen through the display; a root handler would print everything a second time.
    logger.propagate = False
    return handler
