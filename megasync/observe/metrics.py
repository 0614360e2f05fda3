"""Metrics of a run: one strict JSON object per line of `metrics.jsonl`, and the same values as TensorBoard events.

A line contains exactly the keys that were measured; `read_metrics` returns the union of all keys, with None where a key
is absent. A non-finite value is written as null. Every line is flushed. A damaged line, such as one that a killed
process or a full disk has torn, costs only itself: readers leave it out, and the next writer removes it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megasync.base.files import atomic_write

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
# Keys of a line that are not metrics.
STEP, TIME = "step", "time"


class MetricsLog:
    """Appends to the metrics of a run directory; the first line opens the files.

    A resumed run, or one whose trainer returned to a checkpoint, logs some steps a second time. So opening the files
    removes lines of later steps, and lines of the same step that share a key with the new line.
    """

    def __init__(self, run_dir: Path, tensorboard: bool, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(run_dir) / METRICS_FILE
        self._board_dir = Path(run_dir) / TENSORBOARD_DIR if tensorboard else None
        self._clock = clock
        self._file: TextIO | None = None
        self._board: EventFileWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line. `step` counts trained steps; values are numbers (bools and numpy scalars too)."""
        file = self._file or self._open(step, values)
        now = self._clock()
        row = {STEP: step, TIME: round(now, 3)} | {key: _finite(value) for key, value in values.items()}
        file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        if self._board is not None:
            scalars = [
                Summary.Value(tag=key, simple_value=value)
                for key, value in row.items()
                if key not in (STEP, TIME) and value is not None
            ]
            self._board.add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))
            self._board.flush()

    def close(self) -> None:
        """Closes the files; the next line opens them again."""
        for opened in (self._file, self._board):
            if opened is not None:
                opened.close()
        self._file = self._board = None

    def _open(self, step: int, values: Mapping[str, float]) -> TextIO:
        earlier = [row for row in read_rows(self._path) if isinstance(row.get(STEP), int)]
        kept = [row for row in earlier if not _superseded(row, step, values)]
        if self._path.is_file():
            atomic_write(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", encoding="utf-8")
        if self._board_dir is not None:
            # Without torch, which its own writer of TensorBoard files needs.
            self._board = EventFileWriter(str(self._board_dir))
            if earlier:
                # Earlier files end at this step.
                session = SessionLog(status=SessionLog.START)
                self._board.add_event(Event(wall_time=self._clock(), step=step, session_log=session))
        return self._file


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file, without lines that hold none; empty if the file does not exist."""
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    # Splits bytes, because splitting text would also split at Unicode line separators inside JSON strings.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged.append(number)
    if damaged:
        log.warning("%s: left out %d damaged lines, the first is line %d", path, len(damaged), damaged[0])
    return rows


def read_metrics(run_dir: Path) -> dict[str, list[Any]]:
    """Columns over all lines, in order: the union of their keys, with None where a line lacks a key."""
    rows = read_rows(Path(run_dir) / METRICS_FILE)
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name_p50``, ``name_p90`` and ``name_p99``; nothing of no values. A percentile is one of the values."""
    quantiles = np.percentile(values, (50, 90, 99), method="inverted_cdf").tolist() if len(values) else ()
    return {
        f"{name}_{percentile}": float(value)
        for percentile, value in zip(("p50", "p90", "p99"), quantiles, strict=False)
    }


def _superseded(row: Mapping[str, Any], step: int, values: Mapping[str, float]) -> bool:
    return row[STEP] > step or (row[STEP] == step and any(key in values for key in row))


def _finite(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
