"""A buffer and its ledger as one: the only place where changes become records, and where a run's ledger begins.

Order of every change: the state machine applies it, one transaction records it, and only then is it visible (the call
returns, waiters wake). So a crash at any point leaves the ledger either before the change, which no caller has seen
and which the repeated call makes, or after it, where the repeated call changes nothing (see `state`).

`begin_ledger` writes a new ledger under another name and renames it once the run's start is on disk. So a ledger is
absent or empty, where nothing was ever recorded, or `resume_ledger` can resume it, or it is damaged, which is an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.base.files import PART, durable_rename, fsync
from megasync.buffer.groups import GroupEntry
from megasync.buffer.ledger import WITHOUT, Ledger, Report, begun
from megasync.buffer.payload import EncodedGroup, LeasedGroup
from megasync.buffer.state import (
    BufferSnapshot,
    BufferStateError,
    BufferStatus,
    FailedStep,
    TrajectoryBuffer,
)
from megasync.config.pacing import Pacing
from megasync.errors import LedgerError

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig

log = logging.getLogger(__name__)

T = TypeVar("T")


class DurableBuffer:
    """``state`` answers queries; changes go through the methods. Without a ``ledger`` path nothing is recorded.

    A ledger that holds anything takes precedence over ``version`` and ``counters``. ``rollback_step`` is the oldest
    step that a rollback will go to, if older than the kept checkpoints. With ``shared`` other machines read the bodies
    of leased groups, over a file system that they share. ``report`` receives the progress of the read. Once the ledger
    could not be written or read, the buffer is closed and every later change raises the same LedgerError.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        total_groups: int | None,
        clock: Callable[[], float],
        *,
        ledger: str | Path | None = None,
        version: int = 0,
        counters: Mapping[str, Any] | None = None,
        rollback_step: int | None = None,
        shared: bool = False,
        report: Report = lambda text: None,
    ) -> None:
        # Entries changed since the last record, by number.
        self._changed: dict[int, GroupEntry] = {}
        # Whether changes are recorded later, at the end of `together`.
        self._together = False
        self._broken: LedgerError | None = None
        self._shared = shared
        self.ledger = Ledger(ledger) if ledger is not None else None
        self.state = TrajectoryBuffer(
            Pacing.of(schedule),
            stale=schedule.stale,
            total_groups=total_groups,
            version=version,
            counters=counters,
            snapshot=self._read(rollback_step, report),
            clock=clock,
            changed=self._mark_changed if self.ledger is not None else lambda entry: None,
        )

    def change(self, call: Callable[[TrajectoryBuffer], T], to_disk: bool = False) -> T:
        """Makes the call and records its changes. With ``to_disk`` they survive a power loss too."""
        with self._recording():
            result = call(self.state)
            if not self._together:
                self._record(to_disk)
        return result

    @contextmanager
    def together(self) -> Generator[None]:
        """Records all changes within in one transaction, at its end. None may be `to_disk`."""
        with self._recording():
            self._together = True
            try:
                yield
            finally:
                self._together = False
                self._record()

    def _record(self, to_disk: bool = False) -> None:
        if self.ledger is not None:
            self.ledger.write(self.state.status, self._changed.values(), to_disk)
            self._changed.clear()

    def sync(self) -> None:
        """All that was recorded survives a power loss, and other machines that share the file system can read it.

        Does nothing with a broken ledger.
        """
        if self.ledger is not None and self._broken is None:
            with self._recording():
                self.ledger.sync()

    @contextmanager
    def _recording(self) -> Generator[None]:
        """An error of the ledger closes the buffer, and every later change raises it."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except LedgerError as error:
            self._broken = error
            self.state.close(str(error))
            raise

    def commit(self, group: EncodedGroup) -> bool:
        return self.change(lambda state: state.commit(group))

    def lease(self, step: int, version: int) -> list[LeasedGroup] | None:
        """As the state machine's. Returns groups whose recorded bodies are damaged, to be generated again."""
        if self.ledger is not None and self._broken is None and not self.state.leased_uids():
            while damaged := self.ledger.find_damaged(self.state.next_batch()):
                for uid, problem in damaged.items():
                    log.warning("Group %s is generated again: %s", uid, problem)
                    self.change(lambda state, uid=uid: state.damaged(uid))
        groups = self.change(lambda state: state.lease(step, version))
        if self._shared and groups is not None:
            self.sync()
        return groups

    def step_failed(self, step: int, attempts: int, most_in_a_row: int) -> FailedStep:
        """As the state machine's. The bodies of the groups are checked again before they are leased again."""
        if self.ledger is not None:
            self.ledger.check_again(self.state.leased_uids())
        return self.change(lambda state: state.step_failed(step, attempts, most_in_a_row), to_disk=True)

    def publish(self, version: int) -> None:
        """As the state machine's, and frees space. A flush to disk begins, for which nobody waits."""
        self.change(lambda state: state.publish(version))
        self._prune()

    def checkpointed(self, step: int, oldest_kept: int) -> None:
        """As the state machine's, and frees space. Does nothing with a broken ledger."""
        if self._broken is not None:
            return
        self.change(lambda state: state.checkpointed(step, oldest_kept))
        self._prune()

    def rollback(self, step: int, version: int) -> None:
        """`TrajectoryBuffer.rollback` with every group that the ledger still has."""
        groups = self.ledger.payloads(self.state.trained_after(step)) if self.ledger is not None else {}
        self.change(lambda state: state.rollback(step, version, groups), to_disk=True)

    def _mark_changed(self, entry: GroupEntry) -> None:
        self._changed[entry.number] = entry

    def _read(self, rollback_step: int | None, report: Report) -> BufferSnapshot | None:
        if self.ledger is None:
            return None
        try:
            return None if self.ledger.empty else self.ledger.read(rollback_step, report)
        except LedgerError:
            self.ledger.close()
            raise

    def _prune(self) -> None:
        if self.ledger is not None:
            self.ledger.prune(self.state.status.oldest_kept, self.state.least_version)


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
    buffer = DurableBuffer(schedule, total_groups, time.monotonic, ledger=path, rollback_step=step, report=report)
    ledger, status = buffer.ledger, buffer.state.status
    assert ledger is not None
    try:
        ledger.check(report)
        if "origin" not in status.inherited:
            raise LedgerError(f"{path} does not hold how its run began; {WITHOUT}")
        buffer.rollback(step, status.newest_version)
        buffer.change(lambda state: state.take_over(), to_disk=True)
        return ResumedLedger(status.newest_version, ledger.admitted(), ledger.scores(), status.inherited["origin"])
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
            ledger.write(status, [], to_disk=True)
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
