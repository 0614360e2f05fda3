"""The result of a run, the summary that is printed at its end, and how the run is resumed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from megasync.config import custom_of
from megasync.errors import ConfigError
from megasync.observe.curve import CURVE_FILE
from megasync.observe.metrics import METRICS_FILE, TENSORBOARD_DIR
from megasync.observe.samples import SAMPLES_FILE, answers_table, before_and_after, read_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How far a run came, and where its results are; of a supervised run, ``losses`` in place of scores."""

    # The folder with everything that the run wrote.
    run_dir: Path
    # Trained steps.
    step: int
    # The weight version that was published last; None of a supervised run.
    version: int | None = None
    # Held-out scores as (step, score); empty without an evaluation set.
    scores: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    # Validation losses as (step, loss), since it was started last.
    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    # Hugging Face export of the final weights; None if checkpoint.export is off or nothing was trained.
    export_dir: Path | None = None
    # Why the run ended before schedule.total_steps; empty if it did not.
    stopped: str = ""
    # Whether it reached its goal: all of its steps, or schedule.stop_at_score. Otherwise it can be resumed.
    finished: bool = True


def resume_command(run_dir: Path) -> str:
    """How a run is resumed: on the command line, or from Python if it got rows or functions from there."""
    try:
        custom = custom_of(run_dir)
    except ConfigError:
        custom = []
    if not custom:
        return f"megasync resume {shlex.quote(str(run_dir))}"
    return f"AsyncTrainer.resume({str(run_dir)!r}, {', '.join(f'{name}=...' for name in custom)}).train()"


def show_result(result: RunResult, console: Console) -> None:
    """Prints how far a run came, where its results are, and how it is resumed unless it is finished.

    Before that, sample answers before and after training, if the run has them.
    """
    if pairs := before_and_after(read_answers(result.run_dir)):
        console.print(answers_table(pairs))
    version = "" if result.version is None else f", published version {result.version}"
    reason = f" ({result.stopped})" if result.stopped else ""
    lines = [f"trained {result.step} steps{version}{reason}"]
    if scores := result.scores:
        lines.append(f"held-out score {scores[0][1]:.3f} -> {scores[-1][1]:.3f}")
    if losses := result.losses:
        lines.append(f"validation loss {losses[0][1]:.4f} -> {losses[-1][1]:.4f}")
    files = {
        "learning curve": CURVE_FILE,
        "metrics": METRICS_FILE,
        "TensorBoard": TENSORBOARD_DIR,
        "samples": SAMPLES_FILE,
    }
    lines += [f"{name}: {path}" for name, file in files.items() if (path := result.run_dir / file).exists()]
    if result.export_dir is not None:
        lines.append(f"Hugging Face checkpoint: {result.export_dir}")
    if not result.finished:
        lines.append(f"to resume: {resume_command(result.run_dir)}")
    for text in lines:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
