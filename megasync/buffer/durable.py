"""A buffer and its ledger as one: the only place where changes become records.

Order of every change: the state machine applies it, one transaction records it, and only then anybody learns of it (the
answer goes back, sleepers are woken). So a crash at any point leaves the ledger either before the change, and then nobody
has built on it and the call is made again, or after it, and then the call made again does nothing (see `state`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.buffer.entry import Entry
from megasync.buffer.ledger import Ledger, Report
from megasync.buffer.record import Record
from megasync.buffer.state import TrajectoryBuffer
from megasync.config.pacing import Pacing
from megasync.errors import LedgerError
from megasync.trajectory import Group

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig

T = TypeVar("T")


class DurableBuffer:
    """``state`` is for questions; changes go through the methods. Without a ``ledger`` path nothing is kept.

    A ledger that holds something comes before ``version`` and ``counters``; ``rollback_step`` is the oldest step that a
    rollback will go to, for one older than the checkpoints that were kept; ``report`` hears how far the reading is. Once
    the ledger could not be written or read the buffer is closed, and every later change raises the same LedgerError.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        total_groups: int | None,
        clock: Callable[[], float],
        *,
        ledger: str | Path | None = None,
        version: int = 0,
        counters: dict[str, Any] | None = None,
        rollback_step: int | None = None,
        report: Report = lambda text: None,
    ) -> None:
        # Entries that have changed since the last record, by number.
        self._changed: dict[int, Entry] = {}
        self._broken: LedgerError | None = None
        self.ledger = Ledger(ledger) if ledger is not None else None
        self.state = TrajectoryBuffer(
            Pacing.of(schedule),
            stale=schedule.stale,
            total_groups=total_groups,
            version=version,
            counters=counters,
            record=self._read(rollback_step, report),
            clock=clock,
            changed=self._note if self.ledger is not None else lambda entry: None,
        )

    def change(self, call: Callable[[TrajectoryBuffer], T], to_disk: bool = False) -> T:
        """Makes the call and records what it changed. ``to_disk`` keeps that safe from a loss of power too."""
        if self._broken is not None:
            raise self._broken
        try:
            result = call(self.state)
            if self.ledger is not None:
                self.ledger.write(self.state.standing, self._changed.values(), to_disk)
        except LedgerError as error:
            self._broken = error
            self.state.close(str(error))
            raise
        self._changed.clear()
        return result

    def commit(self, group: Group) -> bool:
        """Raises DataError, changing nothing, for a group that cannot be recorded."""
        if self.ledger is not None:
            self.ledger.prepare(group)
        return self.change(lambda state: state.commit(group))

    def publish(self, version: int) -> None:
        self.change(lambda state: state.publish(version), to_disk=True)
        self._prune()

    def checkpointed(self, step: int, oldest_kept: int) -> None:
        """Makes room only, so a ledger that could not be written is left as it is."""
        if self._broken is not None:
            return
        self.change(lambda state: state.checkpointed(step, oldest_kept))
        self._prune()

    def rollback(self, step: int, version: int) -> None:
        """`TrajectoryBuffer.rollback` with every payload that is there still."""
        payloads = self.ledger.payloads(self.state.trained_after(step)) if self.ledger is not None else {}
        self.change(lambda state: state.rollback(step, version, payloads), to_disk=True)

    def _note(self, entry: Entry) -> None:
        self._changed[entry.number] = entry

    def _read(self, rollback_step: int | None, report: Report) -> Record | None:
        if self.ledger is None:
            return None
        try:
            return None if self.ledger.empty else self.ledger.read(rollback_step, report)
        except LedgerError:
            self.ledger.close()
            raise

    def _prune(self) -> None:
        if self.ledger is not None:
            self.ledger.prune(self.state.standing.oldest_kept, self.state.least_version)
