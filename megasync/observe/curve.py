"""Plots the learning curve of a run from `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasync.observe.metrics import STEP, TIME, read_metrics
from megasync.observe.names import (
    HELD_OUT_PREFIX,
    REWARD,
    SAMPLED_RATE,
    SET_SCORE_AT,
    STALENESS_MAX,
    STALENESS_MEAN,
    TRAINED_RATE,
    TRAINING_LOSS,
    VALIDATION_LOSS,
)

CURVE_FILE = "curve.png"
SIZE_INCHES, DPI = (11, 7.5), 120
THROUGHPUT = "throughput (tokens/s of wall time)"
# Colours of the held-out scores. Further scores are left out, because the plot would be unreadable.
COLOURS = ("tab:red", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")

Points = list[tuple[float, float]]


def plot_curve(run_dir: Path, title: str) -> Path | None:
    """Writes `curve.png` into the run directory and returns its path; None if there are no metrics yet."""
    columns = read_metrics(run_dir)
    if not columns:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start = min(columns[TIME])
    columns["minutes"] = [(time - start) / 60 for time in columns[TIME]]
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    if TRAINING_LOSS in columns or VALIDATION_LOSS in columns:
        left, right = figure.subplots(1, 2)
        _lines(left, "loss per trained token", columns, {"training": TRAINING_LOSS, "validation": VALIDATION_LOSS})
        _lines(right, THROUGHPUT, columns, {"trained": TRAINED_RATE})
    else:
        by_step, by_time, ages, rates = figure.subplots(2, 2).flat
        _learning(by_step, columns, STEP, "training step")
        _learning(by_time, columns, "minutes", "minutes since the first measurement")
        staleness = {"mean": STALENESS_MEAN, "max": STALENESS_MAX}
        _lines(ages, "staleness of trained tokens (versions)", columns, staleness)
        _lines(rates, THROUGHPUT, columns, {"sampled": SAMPLED_RATE, "trained": TRAINED_RATE})
    path = Path(run_dir) / CURVE_FILE
    figure.savefig(path)
    return path


def points(columns: dict[str, list[Any]], x: str, y: str) -> Points:
    """(x, y) of the rows that have both values, ordered by x."""
    return sorted(
        (a, b) for a, b in zip(columns[x], columns.get(y, ()), strict=False) if a is not None and b is not None
    )


def held_out_name(key: str) -> str | None:
    """The legend label of a held-out score; None if the key is another metric."""
    if key.startswith(HELD_OUT_PREFIX):
        return f"held-out, temperature {key.removeprefix(HELD_OUT_PREFIX)}"
    match = SET_SCORE_AT.fullmatch(key)
    return None if match is None else f"{match[1]}, temperature {match[2]}"


def _learning(axis: Any, columns: dict[str, list[Any]], x: str, label: str) -> None:
    rewards = points(columns, x, REWARD)
    axis.plot(*_unzip(rewards), color="tab:blue", linewidth=1, alpha=0.7, label="reward (training)")
    held_out = {key: name for key in sorted(columns) if (name := held_out_name(key)) is not None}
    for colour, (key, name) in zip(COLOURS, held_out.items(), strict=False):
        axis.plot(*_unzip(points(columns, x, key)), color=colour, marker="o", markersize=4, label=name)
    if all(0 <= reward <= 1 for _, reward in rewards):
        axis.set_ylim(-0.03, 1.03)
    _finish(axis, "reward and held-out accuracy", label)


def _lines(axis: Any, title: str, columns: dict[str, list[Any]], keys: dict[str, str]) -> None:
    for name, key in keys.items():
        axis.plot(*_unzip(points(columns, STEP, key)), linewidth=1.2, label=name)
    axis.set_ylim(bottom=0)
    _finish(axis, title, "training step")


def _finish(axis: Any, title: str, label: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _unzip(line: Points) -> tuple[Sequence[float], Sequence[float]]:
    return [x for x, _ in line], [y for _, y in line]
