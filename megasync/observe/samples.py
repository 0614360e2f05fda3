"""Answers to the same held-out prompts over the course of a run, stored in `samples.jsonl` and shown side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.table import Table
from rich.text import Text

from megasync.concurrency.first_use import prepared
from megasync.observe.metrics import read_rows

SAMPLES_FILE = "samples.jsonl"
# The table shortens longer texts in the middle; the file keeps them in full.
SHOWN_CHARACTERS = 240


@prepared
@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """The greedy answer to one held-out prompt by the weights of `version`, after `step` training steps."""

    step: int
    version: int
    prompt: str
    text: str
    reward: float | None


def append_answers(
    run_dir: Path, step: int, version: int, answers: Iterable[tuple[str, str, float | None]]
) -> list[SampleAnswer]:
    """Appends (prompt, text, reward) triples to the run's file, and returns them as written."""
    samples = [SampleAnswer(step, version, *answer) for answer in answers]
    path = Path(run_dir) / SAMPLES_FILE
    if path.is_file():
        # Removes a line torn by a full disk or a killed process, which would corrupt the next one.
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in samples)
    return samples


def read_answers(run_dir: Path) -> list[SampleAnswer]:
    """The answers of a run, without damaged lines."""
    keys = {item.name for item in fields(SampleAnswer)}
    return [SampleAnswer(**row) for row in read_rows(Path(run_dir) / SAMPLES_FILE) if row.keys() == keys]


def before_and_after(answers: Iterable[SampleAnswer]) -> list[tuple[SampleAnswer, SampleAnswer]]:
    """The earliest and the latest answer to each prompt that was answered at two different steps."""
    first: dict[str, SampleAnswer] = {}
    last: dict[str, SampleAnswer] = {}
    for answer in answers:
        if answer.prompt not in first or answer.step < first[answer.prompt].step:
            first[answer.prompt] = answer
        if answer.prompt not in last or answer.step >= last[answer.prompt].step:
            last[answer.prompt] = answer
    return [(first[prompt], last[prompt]) for prompt in first if first[prompt].step < last[prompt].step]


def answers_table(pairs: list[tuple[SampleAnswer, SampleAnswer]]) -> Table:
    """A terminal table of prompts with their answers and rewards before and after training."""
    table = Table(title="Held-out prompts before and after training", title_justify="left", show_lines=True)
    before, after = (sorted({answer.step for answer in side}) for side in zip(*pairs, strict=True))
    table.add_column("prompt", overflow="fold", ratio=2)
    for steps in (before, after):
        table.add_column(f"step {_steps(steps)}", overflow="fold", ratio=1)
        table.add_column("reward", justify="right")
    for early, late in pairs:
        table.add_row(_text(early.prompt), *_cells(early), *_cells(late))
    return table


def _cells(answer: SampleAnswer) -> tuple[Text, str]:
    return _text(answer.text), "-" if answer.reward is None else f"{answer.reward:.2f}"


def _text(text: str) -> Text:
    """Plain text: answers may contain anything, including markup and control characters."""
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]} ... {text[-SHOWN_CHARACTERS // 2 :]}"
    return Text("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))


def _steps(steps: list[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
