"""How it went: the curves of a run, its held-out scores, and a table of evenly spaced steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megasync.observe import names
from megasync.observe.curve import held_out_name
from megasync.watch import figures
from megasync.watch.document import Cell, Number, Section, Table, chart, fixed, number, seconds
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
    section.add(chart(figures.reward(run), "Mean reward in training, and scores on held-out prompts.", wide=True))
    if run.supervised:
        section.add(chart(figures.losses(run), "Negative log-probability of a trained token.", wide=True))
    section.add(_score_table(run), _table(run))
    section.add(
        chart(figures.staleness(run), "Versions between the weights that sampled a response and those that it trained.")
    )
    section.add(chart(figures.staleness_ages(run), "Ages of the trained tokens, in versions."))
    section.add(chart(figures.lengths(run), "Lengths of the latest responses, and of the trained ones if measured."))
    section.add(chart(figures.truncated(run), "Responses that reached the maximum length."))
    section.add(chart(figures.entropy(run), "Entropy of the policy, over the computed tokens."))
    section.add(chart(figures.gaps(run), "How far the servers' probabilities are from the trainer's."))
    section.add(
        chart(figures.clipping(run), "Tokens that the loss clipped, and those that the off-policy correction changed.")
    )
    if not run.supervised:
        section.add(chart(figures.losses(run), "Loss of the policy, with its KL and entropy terms."))
    section.add(chart(figures.norms(run), "Norm of all gradients before clipping."))
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
