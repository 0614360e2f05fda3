"""Where a run stands when it begins or goes on: checkpoint, ledger and prompt source brought to agree.

checkpoint  ledger   the run
----------  -------  ---------------------------------------------------------------------------------
no          no       begins; a ledger that is empty is none
no          yes      was killed before its first checkpoint: trains from the start, on what is finished
yes         yes      goes on from both
yes         no       goes on, and generates again what was finished but not trained
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megasync.buffer.ledger import begun
from megasync.buffer.resume import begin_ledger, resume_ledger
from megasync.config.schema import ScheduleConfig
from megasync.control.progress import Progress
from megasync.data import PromptSource
from megasync.trainer.checkpoint import read_state

# Seconds between two messages of a long reading.
SAY_SECONDS = 10.0


def restore(
    checkpoint: Path | None, ledger: Path, schedule: ScheduleConfig, source: PromptSource, say: Callable[[str], None]
) -> Progress:
    """Puts `source` and the ledger back to the checkpoint, and says which version its weights are to be published as.

    Raises LedgerError and DataError.
    """
    state = None if checkpoint is None else read_state(checkpoint)
    progress = Progress() if state is None else Progress.from_state(state)
    version = progress.version
    if not begun(ledger):
        origin = {"cursor": source.state(), "pending": []}
        if state is not None:
            say(f"{ledger} is missing or empty: finished groups that were not trained are generated again")
            origin = {"cursor": state["cursor"], "pending": state["pending"]}
            # The checkpoint's weights may be newer than its version: they are published as the next one.
            version += bool(progress.unpublished)
        begin_ledger(ledger, progress.step, version, state["buffer"] if state else {}, origin)
        admitted = []
    else:
        total = schedule.total_steps * schedule.groups_per_step
        resumed = resume_ledger(ledger, schedule, total, progress.step, _paced(say))
        origin, admitted = resumed.origin, resumed.admitted
        if progress.unpublished or resumed.version != version:
            # Some server or token may carry the number of weights that are gone, so these get a new one.
            version = resumed.version + 1
    source.restore(origin["cursor"])
    source.requeue(origin["pending"])
    source.skip(admitted)
    return Progress(progress.step, version, history=progress.history)


def _paced(say: Callable[[str], None]) -> Callable[[str], None]:
    """Says of the ledger's reports as many as a person wants to read."""
    said = time.monotonic()

    def report(text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            say(f"reading the ledger: {text}")

    return report
