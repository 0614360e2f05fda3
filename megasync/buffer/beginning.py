"""Where a run's ledger begins, and where a resumed run takes it up.

`begin_ledger` writes a new ledger under another name and renames it once the run's start is on disk. So a ledger is
absent or empty, where nothing was ever recorded, or `resume_ledger` can resume it, or it is damaged, which is an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.base.files import PART, durable_rename, fsync
from megasync.buffer.ledger import WITHOUT, Ledger, Report, begun
from megasync.buffer.state import BufferStateError, BufferStatus, TrajectoryBuffer
from megasync.config.pacing import Pacing
from megasync.errors import LedgerError

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig


@dataclass(frozen=True, slots=True)
class ResumedLedger:
    """``version`` is the newest version in use; ``admitted`` are the uids of all groups in order of admission;
    ``scores`` are the mean rewards of those that have one, in the same order; ``origin`` is what `begin_ledger` was
    given.
    """

    version: int
    admitted: list[str]
    scores: list[tuple[str, float]]
    origin: dict[str, Any]


def resume_ledger(
    path: Path, schedule: ScheduleConfig, total_groups: int, step: int, report: Report = lambda text: None
) -> ResumedLedger:
    """Takes the ledger back to ``step``, for a new buffer to continue from.

    Groups that were leased, or trained by later steps, are finished again; those that were being generated wait to be
    reclaimed, with their partial responses. Idempotent. ``report`` receives the progress. Raises LedgerError.
    """
    if not begun(path):
        raise LedgerError(f"{path} is missing or empty: the run ended before it began; start it again")
    ledger = Ledger(path)
    try:
        snapshot = ledger.read(step, report)
        ledger.check(report)
        if "origin" not in snapshot.status.inherited:
            raise LedgerError(f"{path} does not hold how its run began; {WITHOUT}")
        state = TrajectoryBuffer(
            Pacing.of(schedule),
            stale=schedule.stale,
            total_groups=total_groups,
            snapshot=snapshot,
            clock=time.monotonic,
            changed=ledger.mark,
        )
        state.rollback(step, state.status.newest_version, ledger.payloads(state.trained_after(step)))
        state.take_over()
        ledger.write(state.status, to_disk=True)
        newest, origin = state.status.newest_version, state.status.inherited["origin"]
        return ResumedLedger(newest, ledger.admitted(), ledger.scores(), origin)
    except BufferStateError as error:
        raise LedgerError(f"{path} does not belong to this checkpoint: {error}; {WITHOUT}") from error
    finally:
        ledger.close()


def begin_ledger(path: Path, step: int, version: int, counters: Mapping[str, Any], origin: dict[str, Any]) -> None:
    """Creates an empty ledger for a run that continues after ``step`` with ``version`` and the buffer's ``counters``.

    `resume_ledger` returns ``origin``, which is any JSON value of the caller. Raises LedgerError, and leaves no file
    then.
    """
    log = path.with_name(f"{path.name}-wal")
    if begun(log):
        raise LedgerError(f"{log} is the log of a missing ledger; put {path.name} back beside it, or remove it")
    draft = path.with_name(path.name + PART)
    _remove(draft)
    status = BufferStatus.initial(step, version, counters)
    status.inherited["origin"] = origin
    try:
        ledger = Ledger(draft)
        try:
            ledger.write(status, to_disk=True)
            ledger.merge_log()
        finally:
            ledger.close()
        fsync(draft)
        durable_rename(draft, path)
    except OSError as error:
        raise LedgerError(f"{path} cannot be created: {error}; free some space, then start the run again") from error
    finally:
        _remove(draft)


def _remove(ledger: Path) -> None:
    """Removes the file and those that SQLite keeps beside it."""
    for suffix in ("", "-wal", "-journal", "-shm"):
        ledger.with_name(ledger.name + suffix).unlink(missing_ok=True)
