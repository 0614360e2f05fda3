"""How it went: the curves of a run, its held-out scores, and a table of evenly spaced steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megasync.observe import names
from megasync.observe.curve import held_out_name
from megasync.watch import figures
from megasync.watch.document import Cell, Number, Section, Table, charts, fixed, number, seconds
from megasync.watch.metric_table import Series
from megasync.watch.run_folder import RunFolder

COURSE_ROWS = 12
# Columns of the course of a run: heading, metric, how it is shown.
COURSE: Sequence[tuple[str, str, Callable[[float | None], Cell]]] = (
    ("Reward", names.REWARD, fixed),
    ("Score", names.SCORE, fixed),
    ("Loss", names.TRAINING_LOSS, fixed),
    ("Validation loss", names.VALIDATION_LOSS, fixed),
    ("Staleness", names.STALENESS_MEAN, number),
    ("Generated tokens/s", names.SAMPLED_RATE, number),
    ("Trained tokens/s", names.TRAINED_RATE, number),
    ("Length", "rollout/response_length", number),
    ("Entropy", "train/entropy", number),
    ("Gradient norm", "train/grad_norm", number),
)


def course(run: RunFolder) -> Section:
    section = Section("How it went")
    section.add(*charts(run, figures.reward, wide=True))
    if run.supervised:
        section.add(*charts(run, figures.losses, wide=True))
    section.add(_score_table(run), _table(run))
    section.add(*charts(run, figures.staleness, figures.staleness_ages, figures.lengths, figures.truncated))
    section.add(*charts(run, figures.entropy, figures.gaps, figures.clipping))
    section.add(*charts(run, *(() if run.supervised else (figures.losses,)), figures.norms))
    return section


def _score_table(run: RunFolder) -> Table:
    """First, best and last of every held-out score."""
    rows: list[Sequence[Cell]] = []
    for name, series in run.scores.items():
        scores = series.finite
        if len(scores):
            best = int(scores.values.argmax())
            rows.append(
                (
                    held_out_name(name) or name,
                    *(fixed(float(scores.values[at])) for at in (0, best, -1)),
                    Number(int(scores.steps[best]), str(scores.steps[best])),
                    Number(len(scores), str(len(scores))),
                )
            )
    headings = ("Set", "First", "Best", "Last", "Step of the best", "Evaluations")
    return Table("Scores on held-out prompts: share of right answers.", headings, rows)


def _table(run: RunFolder) -> Table | None:
    """The run at evenly spaced steps."""
    steps = np.unique(np.concatenate([run.series(name).steps for _, name, _ in COURSE])).astype(np.int64)
    if not len(steps):
        return None
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, COURSE_ROWS).round().astype(int))]
    columns = [(heading, run.series(name).finite, show) for heading, name, show in COURSE]
    columns = [column for column in columns if len(column[1])]
    clock = run.series("version") if len(run.series("version")) else columns[0][1]
    rows = []
    for step in chosen.tolist():
        at = _up_to(clock, step)
        passed = None if at is None else float(run.elapsed(clock.times[at : at + 1])[0])
        cells = [show(_value_up_to(series, step)) for _, series, show in columns]
        rows.append((Number(step, str(step)), seconds(passed), *cells))
    headings = ("Step", "Time", *(heading for heading, *_ in columns))
    return Table("The run at evenly spaced steps; each number is the latest measured by then.", headings, rows)


def _up_to(series: Series, step: int) -> int | None:
    """Index of the last value at or before the step."""
    at = int(np.searchsorted(series.steps, step, side="right")) - 1
    return at if at >= 0 else None


def _value_up_to(series: Series, step: int) -> float | None:
    at = _up_to(series, step)
    return None if at is None else float(series.values[at])
