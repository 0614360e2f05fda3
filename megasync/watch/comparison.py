"""How several runs differ: what they reached and how soon, their curves on common axes, and their settings.

Runs are aligned by trained steps, by trained tokens and by time in which a driver lived (`figures.AXES`). Nothing is
interpolated: a threshold counts as reached with the first measurement that reached it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table as TerminalTable
from rich.text import Text as TerminalText

from megasync.errors import ConfigError
from megasync.observe import names
from megasync.observe.curve import held_out_name
from megasync.watch import configuration, figures, units
from megasync.watch.document import (
    Cell,
    Document,
    Number,
    Section,
    Table,
    chart,
    charts,
    fixed,
    number,
    printable,
    seconds,
    share,
)
from megasync.watch.metric_table import Series
from megasync.watch.run_folder import RunFolder

# Without thresholds of the caller: these parts of the way from the worst first to the best value of all runs.
PARTS = (0.25, 0.5, 0.75, 0.9)
AXIS_WORDS = {"step": "trained steps", "tokens": "trained tokens", "time": "time"}


@dataclass(frozen=True, slots=True)
class Goal:
    """The metric by which runs are compared, and whether more of it is better."""

    name: str
    word: str
    more: bool = True

    def best(self, series: Series) -> int:
        """The place of the best value; the series has one."""
        return int((series.values.argmax if self.more else series.values.argmin)())

    def reached(self, series: Series, threshold: float) -> int | None:
        """The place of the first value that is at least as good as the threshold."""
        places = np.flatnonzero(series.values >= threshold if self.more else series.values <= threshold)
        return int(places[0]) if len(places) else None


GOALS = (
    Goal(names.SCORE, "held-out score"),
    Goal(names.VALIDATION_LOSS, "validation loss", more=False),
    Goal(names.REWARD, "reward"),
    Goal(names.TRAINING_LOSS, "loss", more=False),
)


def goal_of(runs: Sequence[RunFolder]) -> Goal | None:
    """The first goal that every run has measured, else the first that any has; None if nothing was measured."""
    for enough in (all, any):
        for goal in GOALS:
            if enough(len(run.series(goal.name).finite) for run in runs):
                return goal
    return None


def label_apart(runs: Sequence[RunFolder]) -> None:
    """Gives runs of the same name the name of their folder too. Raises ConfigError if two are the same run."""
    places = [run.path.resolve() for run in runs]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise ConfigError(f"{runs[at].path} is named twice; name different runs")
    names = [run.name for run in runs]
    for run, place in zip(runs, places, strict=True):
        if names.count(run.name) > 1:
            run.name = str(place)


def compare(runs: Sequence[RunFolder], thresholds: Sequence[float] = ()) -> Document:
    """The comparison of two or more runs, whose names differ."""
    goal = goal_of(runs)
    results = Section("What they reached")
    results.add(outcomes(runs))
    results.add(scores(runs))
    if goal is not None:
        results.add(times_to(runs, goal, thresholds))
    settings = Section("How they were set up")
    settings.add(settings_table(runs))
    return Document(
        title=" and ".join(run.name for run in runs) if len(runs) == 2 else f"{len(runs)} runs compared",
        subtitle=f"Comparison of megasync runs: {', '.join(str(run.path) for run in runs)}",
        status="",
        abstract=_abstract(runs, goal),
        sections=[results, settings, _curves(runs)],
        notes=[f"{run.name}: {note}" for run in runs for note in run.missing],
    )


def terminal(document: Document) -> RenderableType:
    """The text and the tables of a comparison for a terminal."""
    parts: list[RenderableType] = [TerminalText(printable(document.abstract)), ""]
    for section in document.shown:
        for block in section.blocks:
            if isinstance(block, Table) and not block.folded:
                parts += [_terminal_table(block), ""]
    parts += [TerminalText(printable(note), style="yellow") for note in document.notes]
    return Group(*parts)


# Tables


def outcomes(runs: Sequence[RunFolder]) -> Table:
    """One row a measure, one column a run."""
    measures: list[tuple[str, Callable[[RunFolder], Cell]]] = [
        ("Status", lambda run: run.status),
        ("Trained steps", lambda run: Number(run.step, str(run.step))),
        ("Time", lambda run: seconds(run.seconds)),
        ("Trained tokens", lambda run: number(run.statistic(names.TRAINED_TOKENS, np.sum))),
        *(
            (f"{goal.word[0].upper()}{goal.word[1:]}, {which}", of(goal))
            for goal in GOALS
            for which, of in (("last", _last), ("best", _best))
        ),
        ("Generated tokens/s, median", lambda run: number(run.statistic(names.SAMPLED_RATE, np.median))),
        ("Trained tokens/s, median", lambda run: number(run.statistic(names.TRAINED_RATE, np.median))),
        ("Step, median", lambda run: seconds(run.statistic("time/step", np.median))),
        ("Waiting for groups, share of the time", lambda run: _time_share(run, "time/wait_for_groups")),
        ("Publishing, share of the time", lambda run: _time_share(run, "time/sync")),
        ("Model FLOPs utilization, median", lambda run: share(run.statistic("train/mfu", np.median))),
        ("Staleness, mean", lambda run: number(run.statistic(names.STALENESS_MEAN, np.mean))),
        ("Response length, last", lambda run: number(run.metrics.latest("rollout/response_length"))),
        ("Faults", lambda run: Number(len(run.faults), str(len(run.faults))) if run.events else None),
        ("Prompts dropped", _dropped),
    ]
    rows: list[Sequence[Cell]] = []
    for label, measure in measures:
        cells = [measure(run) for run in runs]
        if any(cell is not None for cell in cells):
            rows.append((label, *cells))
    return Table("Outcomes.", ("", *(run.name for run in runs)), rows)


def scores(runs: Sequence[RunFolder]) -> Table:
    """Last and best of every held-out score."""
    rows: list[Sequence[Cell]] = []
    for name in dict.fromkeys(name for run in runs for name in run.scores):
        cells: list[Cell] = []
        for run in runs:
            cells += [fixed(run.metrics.latest(name)), fixed(run.statistic(name, np.max))]
        rows.append((held_out_name(name) or name, *cells))
    headings = ("Set", *(f"{run.name}, {word}" for run in runs for word in ("last", "best")))
    return Table("Scores on held-out prompts: share of right answers.", headings, rows)


def times_to(runs: Sequence[RunFolder], goal: Goal, thresholds: Sequence[float] = ()) -> Table:
    """Tabulates the steps and the time that each run needed to reach each threshold of the goal."""
    rows: list[Sequence[Cell]] = []
    for threshold in thresholds or _thresholds(runs, goal):
        for axis, word in AXIS_WORDS.items():
            rows.append((f"{threshold:g}", word, *(_needed(run, goal, threshold, axis) for run in runs)))
    sign = "at least" if goal.more else "at most"
    headings = (f"{goal.word}, {sign}", "needs", *(run.name for run in runs))
    return Table(f"What it took to reach a {goal.word} for the first time.", headings, rows)


def settings_table(runs: Sequence[RunFolder]) -> Table:
    """The settings in which the runs differ, their names and folders aside."""
    rows: list[Sequence[Cell]] = [
        (
            item.key,
            *(configuration.shown(value, item.key) for value in item.values),
            configuration.shown(item.default, item.key),
        )
        for item in configuration.differences([run.settings for run in runs])
    ]
    versions_by_run = [run.versions for run in runs]
    for package in dict.fromkeys(package for versions in versions_by_run for package in versions):
        cells = [versions.get(package, "–") for versions in versions_by_run]
        if len(set(cells)) > 1:
            rows.append((f"version of {package}", *cells, "–"))
    return Table("Settings and versions that differ.", ("Key", *(run.name for run in runs), "Default"), rows)


def _thresholds(runs: Sequence[RunFolder], goal: Goal) -> list[float]:
    """Parts of the way that the runs went together, and what they were told to stop at."""
    scores = [run.values(goal.name) for run in runs]
    scores = [values for values in scores if len(values)]
    if not scores:
        return []
    first = min(values[0] for values in scores) if goal.more else max(values[0] for values in scores)
    best = max(values.max() for values in scores) if goal.more else min(values.min() for values in scores)
    levels = {float(f"{first + part * (best - first):.2g}") for part in PARTS}
    if goal.name == names.SCORE:
        targets = (run.settings.get("schedule.stop_at_score") for run in runs)
        levels |= {float(target) for target in targets if isinstance(target, (int, float))}
    return sorted(levels, reverse=not goal.more)


def _needed(run: RunFolder, goal: Goal, threshold: float, axis: str) -> Cell:
    series = run.series(goal.name).finite
    at = goal.reached(series, threshold)
    if at is None:
        return "never" if len(series) else None
    here = Series(series.steps[at : at + 1], series.times[at : at + 1], series.values[at : at + 1])
    if axis == "step":
        return Number(int(here.steps[0]), str(here.steps[0]))
    if axis == "tokens":
        return number(float(run.trained_tokens(here.steps)[0]))
    return seconds(float(run.elapsed(here.times)[0]))


# Curves


def _curves(runs: Sequence[RunFolder]) -> Section:
    section = Section("Their curves")
    main = figures.losses if all(run.supervised for run in runs) else figures.reward
    for axis, word in AXIS_WORDS.items():
        section.add(chart(main(runs, axis), f"{(main.__doc__ or '').rstrip('.')}, by {word}.", wide=True))
    section.add(*charts(runs, *(draw for draw in figures.COMPARABLE.values() if draw is not main)))
    return section


# Text


def _abstract(runs: Sequence[RunFolder], goal: Goal | None) -> str:
    if goal is None:
        return "None of the runs has measured anything yet."
    ranked = []
    for run in runs:
        series = run.series(goal.name).finite
        if len(series):
            at = goal.best(series)
            ranked.append((float(series.values[at]), run, int(series.steps[at])))
    ranked.sort(key=lambda item: item[0], reverse=goal.more)
    told = [f"{run.name} with {value:.3f} at step {step}" for value, run, step in ranked]
    sentences = [f"By their best {goal.word}: {', then '.join(told)}."]
    count = len(configuration.differences([run.settings for run in runs]))
    sentences.append(f"They differ in {units.counted(count, 'setting')}.")
    return " ".join(sentences)


def _terminal_table(table: Table) -> TerminalTable:
    shown = TerminalTable(title=TerminalText(printable(table.caption)), title_justify="left", title_style="bold")
    for at, heading in enumerate(table.headings):
        numeric = any(isinstance(row[at], Number) for row in table.rows)
        shown.add_column(TerminalText(printable(heading)), justify="right" if numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(_terminal_cell(cell) for cell in row))
    return shown


def _terminal_cell(cell: Cell) -> TerminalText:
    text = units.NOTHING if cell is None else cell.text if isinstance(cell, Number) else cell
    return TerminalText(printable(text))


# Measures of one run


def _last(goal: Goal) -> Callable[[RunFolder], Cell]:
    return lambda run: fixed(run.metrics.latest(goal.name))


def _best(goal: Goal) -> Callable[[RunFolder], Cell]:
    def best(run: RunFolder) -> Cell:
        series = run.series(goal.name).finite
        return fixed(float(series.values[goal.best(series)])) if len(series) else None

    return best


def _time_share(run: RunFolder, name: str) -> Cell:
    spent, total = run.values(name), run.values("time/step").sum()
    return share(float(spent.sum() / total)) if len(spent) and total else None


def _dropped(run: RunFolder) -> Cell:
    if (balance := run.balance) is None:
        return None
    count = sum(balance.dropped.values())
    return Number(count, str(count))
