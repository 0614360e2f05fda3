"""A ledger at the start of a run: begun anew, or taken back to the checkpoint that the run goes on from.

A ledger is begun under another name and gets its own when the run's start is on disk. So there are three cases: a
ledger that is absent or empty, where nothing was ever recorded; one that can be resumed; and a damaged one, which is an error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.buffer.durable import DurableBuffer
from megasync.buffer.errors import BufferStateError
from megasync.buffer.ledger import WITHOUT, Ledger, Report, begun
from megasync.buffer.record import Standing
from megasync.errors import LedgerError
from megasync.files import PART, durable_rename, fsync

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig


@dataclass(frozen=True, slots=True)
class Resumed:
    """``version`` is the newest number in use; ``admitted`` are the uids of all groups since the ledger began, in that
    order; ``origin`` is what it began with."""

    version: int
    admitted: list[str]
    origin: dict[str, Any]


def resume_ledger(
    path: Path, schedule: ScheduleConfig, total_groups: int, step: int, report: Report = lambda text: None
) -> Resumed:
    """Makes the ledger one that a new buffer continues after ``step``.

    Groups that were leased, or trained by later steps, are finished again; those that were being generated wait to be
    reclaimed, with their partial responses. Does the same when called again. ``report`` hears how far it is. Raises
    LedgerError.
    """
    if not begun(path):
        raise LedgerError(f"{path} is missing or empty: the run ended before it began; start it again")
    buffer = DurableBuffer(schedule, total_groups, time.monotonic, ledger=path, rollback_step=step, report=report)
    try:
        buffer.ledger.check(report)
        standing = buffer.state.standing
        if "origin" not in standing.inherited:
            raise LedgerError(f"{path} does not hold how its run began; {WITHOUT}")
        buffer.rollback(step, standing.newest_version)
        buffer.change(lambda state: state.take_over(), to_disk=True)
        return Resumed(standing.newest_version, buffer.ledger.admitted(), standing.inherited["origin"])
    except BufferStateError as error:
        raise LedgerError(f"{path} does not belong to this checkpoint: {error}; {WITHOUT}") from error
    finally:
        buffer.ledger.close()


def begin_ledger(path: Path, step: int, version: int, counters: dict[str, Any], origin: dict[str, Any]) -> None:
    """An empty ledger for a run that goes on after ``step`` with ``version`` and the buffer's ``counters``.

    ``origin`` is the caller's (plain JSON values): `resume_ledger` gives it back. Raises LedgerError, leaving nothing.
    """
    log = path.with_name(f"{path.name}-wal")
    if begun(log):
        raise LedgerError(f"{log} is the log of a ledger that is gone; move it to where {path.name} went, or remove it")
    draft = path.with_name(path.name + PART)
    _remove(draft)
    standing = Standing.first(step, version, counters)
    standing.inherited["origin"] = origin
    try:
        ledger = Ledger(draft)
        try:
            ledger.write(standing, [], to_disk=True)
            ledger.merge_log()
        finally:
            ledger.close()
        fsync(draft)
        durable_rename(draft, path)
    except OSError as error:
        raise LedgerError(f"{path} cannot be begun: {error}; free some space, then start the run again") from error
    finally:
        _remove(draft)


def _remove(ledger: Path) -> None:
    """With what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-journal", "-shm"):
        ledger.with_name(ledger.name + suffix).unlink(missing_ok=True)
