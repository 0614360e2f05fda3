"""The commands that run it again, every metric that was logged, and every setting."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from megasync.config import CONFIG_FILE, CUSTOM_FILE
from megasync.observe.registry import METRICS, metric_of
from megasync.watch import configuration
from megasync.watch.document import Cell, Number, Section, Table, Text, Verbatim
from megasync.watch.run_folder import RunFolder


def reproduction(run: RunFolder) -> Section:
    section = Section("How to reproduce it")
    command = "serve" if run.served else "sft" if run.supervised else "train"
    path = shlex.quote(str(run.path))
    lines = [
        "# the same configuration and seed, in a new run directory",
        f"megasync {command} {shlex.quote(str(run.path / CONFIG_FILE))}",
        "# continue this run from its newest checkpoint",
        f"megasync resume {path}",
    ]
    if run.buffered:
        lines += ["# score its newest checkpoint", f"megasync eval {path}"]
    lines += ["# look at it, and write this report again", f"megasync watch {path}", f"megasync report {path}"]
    section.add(Verbatim("\n".join(lines), "bash"))
    if custom := run.custom:
        section.add(
            Text(
                f"The run got {', '.join(custom)} from Python ({CUSTOM_FILE}), so it is started by the program that "
                "calls AsyncTrainer, not by these commands."
            )
        )
    return section


def appendix(run: RunFolder) -> Section:
    section = Section("All metrics and settings")
    order = {metric.name: at for at, metric in enumerate(METRICS)}
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
