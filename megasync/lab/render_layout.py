"""Renders a layout check as tables for a terminal, or as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megasync.base.files import bytes_text
from megasync.lab.layout_check import Report
from megasync.planning.render import facts

SHOWN_NAMES = 3
SHOWN_PROBLEMS = 20


def report_data(report: Report) -> dict[str, Any]:
    """All figures, the problems as dictionaries, and the verdict, ready for JSON."""
    derived = {
        "ratio": report.ratio,
        "offenders": report.offenders,
        "ok": not report.problems,
        "verdict": report.verdict,
    }
    return asdict(report) | {"problems": [problem._asdict() for problem in report.problems]} | derived


def report_tables(report: Report) -> RenderableType:
    parts: list[RenderableType] = [_trainer(report), "", _engine(report), "", _summary(report), ""]
    shown = report.problems[:SHOWN_PROBLEMS]
    parts += [Text(f"{problem.tensor}, {problem.where}: {problem.what}", style="red") for problem in shown]
    parts.append(Text(report.verdict, style="bold red" if report.problems else "bold green"))
    return Group(*parts)


def _trainer(report: Report) -> Table:
    rows = (
        (u.rank, u.tp, u.dp, u.pp, bytes_text(u.held_bytes), bytes_text(u.sent_bytes), u.buckets)
        for u in report.trainer
    )
    return _table("Trainer ranks", ("rank", "tensor", "data", "pipeline", "holds", "sends", "buckets"), rows)


def _engine(report: Report) -> Table:
    rows = ((u.rank, bytes_text(u.received_bytes), u.buckets, bytes_text(u.arena_bytes)) for u in report.engine)
    return _table("Engine ranks", ("rank", "receives", "buckets", "arena"), rows)


def _table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _summary(report: Report) -> Table:
    rows = {
        "on the wire": f"{bytes_text(report.wire_bytes)} per version; the engine ranks keep "
        f"{bytes_text(report.minimum_bytes)}: {report.ratio:.4f} of the minimum",
        "sender's buffers": f"{bytes_text(report.sender_bytes)} (two packed buckets)",
        "replicas": _replicas(report),
        "cast by the engine": "; ".join(f"{cast}: {_names(names)}" for cast, names in report.casts.items())
        or "nothing",
        "filled by the engine": _filled(report) or "nothing",
        "left as loaded": f"{report.frozen} tensors of the vision tower" if report.frozen else "nothing",
        "not written": _names([f"{n} elements of {name}" for name, n in report.untouched.items()]) or "nothing",
        "memory of this check": f"at most {bytes_text(report.peak_bytes)}, besides the weights' file or generator",
    }
    return facts(rows)


def _replicas(report: Report) -> str:
    shared = [group for group in report.replica_groups if len(group.ranks) > 1]
    if not shared:
        return "none; each shard has one sender"
    return "; ".join(
        f"ranks {', '.join(map(str, group.ranks))} send {bytes_text(group.smallest_bytes)} to "
        f"{bytes_text(group.largest_bytes)}"
        for group in shared
    )


def _filled(report: Report) -> str:
    """For each constant, how many elements have it and where."""
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for param, values in report.constants.items():
        for value, elements in values.items():
            places[value][param] = elements
    return "; ".join(
        f"{sum(params.values()):,} elements with {v}, in {_names([*params])}" for v, params in places.items()
    )


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
