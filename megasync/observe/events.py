"""What happened in a run, as lines of `events.jsonl`: faults, recoveries, checkpoints, evaluations, its start and end.

    {"time": 1764000000.5, "kind": "fault", "what": "server-0", "text": "its process has ended. ...", "step": 12}

One process writes, the driver that holds the run's lock, and each line is one write, so a reader sees whole lines and
perhaps a torn last one, which readers and the next writer drop. A resumed run appends. Times are in seconds since the
epoch and need not ascend: a resumed run records when the driver before it died.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megasync.base.files import open_regular
from megasync.observe import trace

EVENTS_FILE = "events.jsonl"
# Seconds since the epoch that a clock can show; what is later is no time.
LATEST_TIME = 4102444800.0
# The kinds of events.
START, END, MESSAGE, FAULT, RECOVERY, EVALUATION, CHECKPOINT, SYNC = (
    *("start", "end", "message", "fault", "recovery", "evaluation", "checkpoint", "sync"),
)
# What recovers with the first step that is trained after a fault.
TRAINING = "training"
# Characters of a text that are kept: a reason may have the end of a process's log.
MOST_TEXT = 4000


class EventSink(Protocol):
    """Whoever records what happens to the processes of a run."""

    def fault(self, what: str, text: str, **fields: Any) -> None:
        """A process died, hung or failed: ``what`` as in `Event`, ``text`` says why."""

    def recovery(self, what: str, text: str, **fields: Any) -> None:
        """A process works again, or another in its place."""


class NoEvents(EventSink):
    """Records nothing."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line. ``what`` names a part of the run, such as `rank 1`, `server-0`, `worker-2`, `router` or `driver`."""

    time: float
    kind: str
    text: str = ""
    what: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


class EventLog:
    """Appends to the events of a run directory. Raises OSError; ``clock`` returns seconds since the epoch."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(run_dir) / EVENTS_FILE
        self._clock = clock
        self._handle: int | None = None

    def write(self, kind: str, text: str, what: str = "", *, at: float | None = None, **fields: Any) -> None:
        """Writes one line; ``at`` is when it happened, if not now. Values of ``fields`` are plain data."""
        if kind in (FAULT, RECOVERY):
            trace.instant("faults", what, kind=kind, text=_clipped(text))
        if self._handle is None:
            self._handle = _opened(self._path)
        row = {"time": round(self._clock() if at is None else at, 3), "kind": kind, "what": what}
        row |= {"text": _clipped(text)} | fields
        line = (json.dumps(row, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")
        if os.write(self._handle, line) != len(line):
            # Opening it again removes what was written.
            self.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """The next line opens the file again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read_events(run_dir: Path) -> list[Event]:
    """The events of a run by time; none where there is no file. Leaves out lines that are not events."""
    try:
        with open_regular(Path(run_dir) / EVENTS_FILE) as lines:
            return sorted(filter(None, map(parse_event, lines)), key=lambda event: event.time)
    except FileNotFoundError:
        return []


def _opened(path: Path) -> int:
    """Opens for appending, without a line that a killed process has left unfinished."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        # A line is at most MOST_TEXT characters of up to 6 bytes, and a few fields.
        start = max(0, size - 64 * 1024)
        os.ftruncate(handle, start + os.pread(handle, size - start, start).rfind(b"\n") + 1)
    return handle


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT // 2]} ... {text[-MOST_TEXT // 2 :]}"


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None for a line that is none."""
    try:
        row = json.loads(line)
        at, kind = float(row.pop("time")), str(row.pop("kind"))
        if not 0 <= at <= LATEST_TIME:
            return None
        return Event(at, kind, str(row.pop("text", "")), str(row.pop("what", "")), row)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None
