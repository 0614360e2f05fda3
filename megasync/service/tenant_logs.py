"""A log file for each tenant: what became of its requests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from megasync.observe.logfile import FORMAT
from megasync.service.promises import Promise
from megasync.service.requests import Failed, Sample

_log = logging.getLogger(__name__)

# Bytes of a file, after which a new one begins; the one before it is kept as `.log.1`.
BYTES = 64 * 10**6


def note(promise: Promise, seconds: float) -> None:
    """Notes the outcome of a request, ``seconds`` after it was accepted; of samples, only failures."""
    failed = promise.outcome if isinstance(promise.outcome, Failed) else None
    if failed is None and promise.request_type == Sample.__name__:
        return
    outcome = "done" if failed is None else f"failed ({failed.category}): {failed.message}"
    level = logging.INFO if failed is None else logging.WARNING
    asked = f"{promise.request_type} {promise.id}, {promise.tokens} tokens, {seconds:.2f} s"
    _log.log(level, "%s: %s", asked, outcome, extra={"tenant": promise.tenant})


class _Files(logging.Handler):
    """Appends each record to the file of its tenant. A failed write must not end a service."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        path = self._folder / f"tenant-{vars(record)['tenant']}.log"
        with contextlib.suppress(OSError):
            with path.open("a", encoding="utf-8") as file:
                file.write(self.format(record) + "\n")
                full = file.tell() > BYTES
            if full:
                path.replace(path.with_suffix(".log.1"))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Writes `tenant-NAME.log` of each tenant into the folder."""
    files = _Files(folder)
    _log.propagate = False
    _log.setLevel(logging.INFO)
    _log.addHandler(files)
    try:
        yield
    finally:
        _log.removeHandler(files)
