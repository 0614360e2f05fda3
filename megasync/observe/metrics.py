"""Metrics of a run: one strict JSON object a line in `metrics.jsonl`, and the same numbers for TensorBoard.

A line holds exactly the keys that were measured, so nothing is ever filled in; `read_metrics` gives the union of all
keys with None in the gaps. A value that is not finite is written as null. Lines are flushed one by one, and a torn last
line (the process died while writing) is dropped by the next reader or writer.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megasync.files import atomic_write
from megasync.observe.tensorboard import EventWriter

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
# Keys of a line that are not measurements.
STEP, TIME = "step", "time"


class MetricsLog:
    """Appends to the metrics of a run directory; opens its files with the first line.

    A resumed run logs steps that were logged already, and so does a run whose trainer went back to a checkpoint: the first
    line after the files were opened removes lines of later steps, and lines of the same step that measured the same keys.
    """

    def __init__(self, run_dir: Path, tensorboard: bool, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(run_dir) / METRICS_FILE
        self._board_dir = Path(run_dir) / TENSORBOARD_DIR if tensorboard else None
        self._clock = clock
        self._file: Any = None
        self._board: EventWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line. `step` counts trained steps; values are numbers (bools and numpy scalars too)."""
        if self._file is None:
            self._open(step, values)
        now = self._clock()
        row = {STEP: step, TIME: round(now, 3)} | {key: _finite(value) for key, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.scalars(step, now, {k: v for k, v in row.items() if k not in (STEP, TIME) and v is not None})

    def close(self) -> None:
        """The next line opens the files again."""
        for opened in (self._file, self._board):
            if opened is not None:
                opened.close()
        self._file = self._board = None

    def _open(self, step: int, values: Mapping[str, float]) -> None:
        earlier = read_rows(self._path)
        kept = [row for row in earlier if not _superseded(row, step, values)]
        resumed = bool(earlier)
        if resumed:
            atomic_write(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", encoding="utf-8")
        if self._board_dir is not None:
            self._board = EventWriter(self._board_dir, self._clock(), resumed_at=step if resumed else None)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines; empty when there is none."""
    if not path.is_file():
        return []
    rows = []
    # Bytes: text would be split at Unicode's own line ends too, which JSON strings may hold.
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not JSON: {line!r:.80}") from None
            log.warning("%s: dropped a torn last line", path)
    return rows


def read_metrics(run_dir: Path) -> dict[str, list[Any]]:
    """Columns over all lines, in the order of lines: the union of keys, None where a line did not measure a key."""
    rows = read_rows(Path(run_dir) / METRICS_FILE)
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}


def _superseded(row: Mapping[str, Any], step: int, values: Mapping[str, float]) -> bool:
    return row[STEP] > step or (row[STEP] == step and any(key in values for key in row))


def _finite(value: float) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
