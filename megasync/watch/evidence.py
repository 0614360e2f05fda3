"""What a run wrote about things that went wrong: reports of hangs, failed steps, and skipped steps.

Each is one file, written whole. A batch that is dumped with it may be large, so only what precedes it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megasync.base.files import open_regular

# Folders of a run directory, and what a file there is.
FOLDERS = {"hang": "hang report", "failed_steps": "failed step", "skipped": "skipped step"}
MOST_FILES = 200
MOST_BYTES = 256 * 1024
# Bytes in which the title of a hang report stands.
TITLE_BYTES = 4096
_BATCH = ', "batch": '


@dataclass(frozen=True, slots=True)
class Evidence:
    """One file. `time` is that of its last change, in epoch seconds; `title` is what it is about in a line."""

    kind: str
    path: Path
    time: float
    title: str


def find_evidence(run_dir: Path) -> list[Evidence]:
    """The newest files first, at most 200. Raises nothing for folders that are absent or cannot be read."""
    files: list[tuple[float, str, Path]] = []
    for folder, kind in FOLDERS.items():
        try:
            files += [(path.stat().st_mtime, kind, path) for path in (run_dir / folder).iterdir() if path.is_file()]
        except OSError:
            continue
    newest = sorted(files, reverse=True)[:MOST_FILES]
    return [Evidence(kind, path, time, _TITLES[kind](path)) for time, kind, path in newest]


def read_evidence(evidence: Evidence) -> str:
    """The text of a report, without the batch of a step. Says so if it cannot be read or was cut."""
    try:
        with open_regular(evidence.path) as file:
            text = file.read(MOST_BYTES + 1).decode("utf-8", "replace")
    except OSError as error:
        return f"{evidence.path} cannot be read: {error.strerror}"
    if evidence.kind != FOLDERS["hang"] and (record := _before_batch(text)) is not None:
        facts = "\n".join(f"{name}: {value}" for name, value in record.items())
        return f"{facts}\n\nThe batch is in {evidence.path}."
    if len(text) <= MOST_BYTES:
        return text
    return f"{text[:MOST_BYTES]}\n\n... cut at {MOST_BYTES // 1024} KiB; the rest is in {evidence.path}."


def _hang_title(path: Path) -> str:
    try:
        with open_regular(path) as file:
            head = file.read(TITLE_BYTES).decode("utf-8", "replace").splitlines()[:5]
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    lines = [line.strip() for line in head if line.strip()]
    # The first line only says that it is a report, and of when.
    told = [line for line in lines if not line.startswith("Hang report")]
    return (told or lines or [path.name])[0][:300]


def _step_title(path: Path) -> str:
    try:
        with open_regular(path) as file:
            record = _before_batch(file.read(MOST_BYTES).decode("utf-8", "replace"))
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if record is None:
        return path.stem
    problem = record.get("error") or f"loss {record.get('loss')}, gradient norm {record.get('grad_norm')}"
    return f"{path.stem}: {problem}".splitlines()[0][:300]


def _before_batch(text: str) -> dict[str, object] | None:
    """The fields of a dump in front of its batch; None if it is not one."""
    at = text.find(_BATCH)
    try:
        record = json.loads(text if at < 0 else f"{text[:at]}}}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


_TITLES: dict[str, Callable[[Path], str]] = {
    FOLDERS["hang"]: _hang_title,
    FOLDERS["failed_steps"]: _step_title,
    FOLDERS["skipped"]: _step_title,
}
