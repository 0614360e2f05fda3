"""Scalars in TensorBoard's event format, by TensorBoard's own writer, without torch in the process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class EventWriter:
    """One event file. With `resumed_at`, viewers forget what earlier files hold from that step on."""

    def __init__(self, directory: Path, now: float, resumed_at: int | None = None) -> None:
        self._writer = EventFileWriter(str(directory))
        if resumed_at is not None:
            session = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now, step=resumed_at, session_log=session))

    def scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        """`now` in seconds since the epoch."""
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in values.items()])
        self._writer.add_event(Event(wall_time=now, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
