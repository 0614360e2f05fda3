"""Shows and stores an evaluation: the progress of each set, the table of scores, and every answer in a file.

Invariant: an answer is flushed to `answers.jsonl` before the progress counts it, and is not kept in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from megasync.base.files import atomic_write
from megasync.evaluation.evaluate import HeldOutAnswer, HeldOutScores
from megasync.observe.names import UNNAMED_SET

ANSWERS_FILE, SCORES_FILE = "answers.jsonl", "scores.json"
# Progress lines per set without a terminal.
_LINES = 4


class EvaluationProgress:
    """Context manager. `parts` are (set, temperature, number of answers), in the order of evaluation."""

    def __init__(self, out: Path, parts: Sequence[tuple[str, float, int]], console: Console) -> None:
        self._out = out
        self._console = console
        self._totals = {(name, temperature): total for name, temperature, total in parts}
        self._done = dict.fromkeys(self._totals, 0)
        self._failed = dict.fromkeys(self._totals, 0)
        self._tasks: dict[tuple[str, float], TaskID] = {}
        self._progress: Progress | None = None
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        self._file = (self._out / ANSWERS_FILE).open("w", encoding="utf-8")
        if self._console.is_terminal:
            columns = (
                *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
                TextColumn("{task.fields[failed]}", style="yellow"),
            )
            self._progress = Progress(*columns, console=self._console)
            for key, total in self._totals.items():
                self._tasks[key] = self._progress.add_task(part_name(*key), total=total, failed="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def answer(self, answer: HeldOutAnswer) -> None:
        row = asdict(answer)
        row["set"] = row.pop("held_out") or UNNAMED_SET
        # The servers hold one folder.
        del row["versions"]
        assert self._file is not None
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        key = (answer.held_out, answer.temperature)
        self._done[key] += 1
        self._failed[key] += answer.reward is None
        failed = f"{self._failed[key]} failed" if self._failed[key] else ""
        if self._progress is not None:
            self._progress.update(self._tasks[key], advance=1, failed=failed)
        elif self._done[key] * _LINES % self._totals[key] < _LINES:
            self.message(f"{part_name(*key)}: {self._done[key]} of {self._totals[key]} {failed}".rstrip())


def part_name(name: str, temperature: float) -> str:
    return f"{name or UNNAMED_SET}, temperature {temperature:g}"


def write_scores(out: Path, model: str, scores: Sequence[HeldOutScores], seconds: float) -> None:
    rows = [asdict(each) for each in scores]
    for row in rows:
        row["set"] = row.pop("held_out") or UNNAMED_SET
    text = json.dumps({"model": model, "seconds": round(seconds, 3), "scores": rows}, indent=2)
    atomic_write(out / SCORES_FILE, text + "\n")


def scores_table(scores: Sequence[HeldOutScores]) -> Table:
    """One row per set and temperature."""
    every_k = sorted({k for each in scores for k in each.pass_at})
    table = Table(title="Held-out scores", title_justify="left")
    table.add_column("set")
    for column in ("temperature", "answers", "score", "reward", *(f"pass@{k}" for k in every_k), "failed"):
        table.add_column(column, justify="right")
    for each in scores:
        passed = (f"{each.pass_at[k]:.3f}" if k in each.pass_at else "-" for k in every_k)
        table.add_row(
            each.held_out or UNNAMED_SET,
            f"{each.temperature:g}",
            str(each.n),
            f"{each.score:.3f}",
            f"{each.reward:.3f}",
            *passed,
            str(each.failed),
        )
    return table
