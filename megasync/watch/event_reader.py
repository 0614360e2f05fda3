"""The events of a run as they are written."""

from __future__ import annotations

from pathlib import Path

from megasync.observe.events import EVENTS_FILE, Event, parse_event
from megasync.watch.growing_file import GrowingFile


class EventReader:
    """Reads the events of a run directory as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(Path(run_dir) / EVENTS_FILE)
        self._damaged = 0

    @property
    def damaged(self) -> int:
        """Lines that were not events and were left out."""
        return self._damaged + self._file.left_out

    def update(self) -> list[Event]:
        """The events since the last call, in the order of the file; none where there is no file. Raises OSError."""
        _, pieces = self._file.read()
        events = [parse_event(line) for lines in pieces for line in lines]
        self._damaged += events.count(None)
        return [event for event in events if event is not None]
