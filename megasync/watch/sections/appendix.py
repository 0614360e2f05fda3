"""Every metric that was logged, and every setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megasync.observe.registry import CHAPTERS, metric_of
from megasync.watch import configuration
from megasync.watch.document import Cell, Number, Section, Table
from megasync.watch.run_folder import RunFolder


def appendix(run: RunFolder) -> Section:
    section = Section("All metrics and settings")
    order = {metric.name: at for at, metric in enumerate(metric for chapter in CHAPTERS for metric in chapter.metrics)}
    entries = {name: metric_of(name) for name in run.metrics.names}

    def place(name: str) -> tuple[int, str]:
        metric = entries[name]
        return (len(order) if metric is None else order[metric.name]), name

    rows: list[Sequence[Cell]] = []
    for name in sorted(entries, key=place):
        series, metric = run.series(name).finite, entries[name]
        if not len(series):
            continue
        values = series.values
        rows.append(
            (
                name,
                metric.unit if metric else "",
                Number(len(values), str(len(values))),
                *(_exact(value) for value in (values[0], values[-1], values.min(), values.mean(), values.max())),
                metric.meaning if metric else "",
            )
        )
    headings = ("Metric", "Unit", "Values", "First", "Last", "Smallest", "Mean", "Largest", "Meaning")
    section.add(Table("Every metric that was logged.", headings, rows, folded=True))
    settings = [(key, configuration.shown(value, key)) for key, value in run.settings.items()]
    section.add(Table("The whole configuration.", ("Key", "Value"), settings, folded=True))
    return section


def _exact(value: Any) -> Number:
    return Number(float(value), f"{float(value):.4g}")
