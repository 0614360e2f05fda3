"""What a run has logged, from its directory."""

from pathlib import Path
from typing import Any

from megasync.observe.metrics import METRICS_FILE, read_rows


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return read_rows(run_dir / METRICS_FILE)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of trained steps."""
    return [row for row in rows_of(run_dir) if "time/step" in row]
