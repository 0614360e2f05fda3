"""A ledger at the start of a run: begun anew, or taken back to the checkpoint that the run goes on from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.buffer.durable import DurableBuffer
from megasync.buffer.errors import BufferStateError
from megasync.buffer.ledger import WITHOUT, Ledger
from megasync.buffer.record import Standing
from megasync.errors import LedgerError

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig


@dataclass(frozen=True, slots=True)
class Resumed:
    """``version`` is the newest number in use; ``admitted`` are the uids of all groups since the ledger began, in that
    order; ``origin`` is what it began with."""

    version: int
    admitted: list[str]
    origin: dict[str, Any]


def resume_ledger(path: Path, schedule: ScheduleConfig, total_groups: int, step: int) -> Resumed:
    """Makes the ledger one that a new buffer continues after ``step``.

    Groups that were leased, or trained by later steps, are finished again; those that were being generated wait to be
    reclaimed, with their partial responses. Does the same when called again. Raises LedgerError.
    """
    buffer = DurableBuffer(schedule, total_groups, time.monotonic, ledger=path, rollback_step=step)
    try:
        buffer.ledger.check()
        standing = buffer.state.standing
        buffer.rollback(step, standing.newest_version)
        buffer.change(lambda state: state.take_over(), to_disk=True)
        return Resumed(standing.newest_version, buffer.ledger.admitted(), standing.inherited["origin"])
    except BufferStateError as error:
        raise LedgerError(f"{path} does not belong to this checkpoint: {error}; {WITHOUT}") from error
    finally:
        buffer.ledger.close()


def begin_ledger(path: Path, step: int, version: int, counters: dict[str, Any], origin: dict[str, Any]) -> None:
    """An empty ledger for a run that goes on after ``step`` with ``version`` and the buffer's ``counters``.

    ``origin`` is the caller's (plain JSON values): `resume_ledger` gives it back.
    """
    ledger = Ledger(path)
    try:
        standing = Standing.first(step, version, counters)
        standing.inherited["origin"] = origin
        ledger.write(standing, [], to_disk=True)
    finally:
        ledger.close()
