"""Makes checkpoint, ledger and prompt source agree when a run starts or resumes.

checkpoint  ledger   the run
----------  -------  ---------------------------------------------------------------------------------------
no          no       starts; an empty ledger counts as none
no          yes      was killed before its first checkpoint: trains from the start, on the finished groups
yes         yes      resumes from both
yes         no       resumes, and generates again the groups that were finished but not trained
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasync.buffer.beginning import begin_ledger, resume_ledger
from megasync.buffer.ledger import begun
from megasync.config.schema import ScheduleConfig
from megasync.control.progress import Progress
from megasync.data import PromptSource
from megasync.data.curriculum import Curriculum
from megasync.trainer.checkpoint import read_state

# Seconds between two messages while the ledger is read.
REPORT_SECONDS = 10.0


def restore(
    checkpoint: Path | None,
    ledger: Path,
    schedule: ScheduleConfig,
    source: PromptSource,
    notify: Callable[[str], None],
    curriculum: Curriculum | None = None,
) -> Progress:
    """Takes `source` and the ledger back to the checkpoint, and gives `curriculum` the ledger's scores.

    The result's version is the one to publish its weights as.

    `notify` receives messages for the user. Raises LedgerError and DataError.
    """
    state = None if checkpoint is None else read_state(checkpoint)
    progress = Progress() if state is None else Progress.from_state(state)
    version = progress.version
    if not begun(ledger):
        origin: dict[str, Any] = {"cursor": source.state(), "pending": []}
        if state is not None:
            notify(f"{ledger} is missing or empty: generating again the groups that were finished but not trained")
            origin = {"cursor": state["cursor"], "pending": state["pending"]}
            # The checkpoint's weights may be newer than its version: they are published as the next one.
            version += bool(progress.unpublished)
        begin_ledger(ledger, progress.step, version, state["buffer"] if state else {}, origin)
        admitted: list[str] = []
    else:
        total = schedule.total_steps * schedule.groups_per_step
        resumed = resume_ledger(ledger, schedule, total, progress.step, _throttled(notify))
        origin, admitted = resumed.origin, resumed.admitted
        if curriculum is not None:
            curriculum.restore(resumed.scores)
        if progress.unpublished or resumed.version != version:
            # A server or a token may carry the version of weights that are lost: these weights get a new one.
            version = resumed.version + 1
    source.restore(origin["cursor"])
    source.requeue(origin["pending"])
    source.skip(admitted)
    return Progress(progress.step, version, history=progress.history)


def _throttled(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Forwards at most one of the ledger's reports every REPORT_SECONDS."""
    last = time.monotonic()

    def report(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            notify(f"reading the ledger: {text}")

    return report
