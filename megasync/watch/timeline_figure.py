"""The figure of a timeline's picture, for the page and for reports alike: rows of bars, and marks as vertical lines.

Whatever a run recorded is text in it, never markup (`_lines`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import plotly.graph_objects as go

from megasync.watch import figures, units
from megasync.watch.timeline import OTHER, Bar, Mark, Picture, Track

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GRAY = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b5a800", "#98a1ad"),
)
# What work is about, each with a colour of its own.
TRAINING, GENERATING, SCORING, SYNC, EVALUATION, STORING, WAITING, INTERRUPTED = (
    *("training", "generating", "rewards and tools", "weight sync", "evaluation", "saving and loading"),
    *("waiting or other", "paused or restarting"),
)
COLOURS = {
    **{TRAINING: BLUE, GENERATING: SKY, SCORING: ORANGE, SYNC: GREEN, EVALUATION: PURPLE, STORING: YELLOW},
    **{WAITING: GRAY, INTERRUPTED: RED},
}
# What spans are about by their names, where that is not what their tracks are about.
_BY_NAME = {
    **dict.fromkeys(("wait for groups", OTHER, "finished", "idle"), WAITING),
    **dict.fromkeys(("pause", "restart"), INTERRUPTED),
    **dict.fromkeys(("checkpoint", "finish checkpoint", "save", "load"), STORING),
    **dict.fromkeys(("publish", "publish to joiners"), SYNC),
    **{"evaluation": EVALUATION, "validate": EVALUATION, "generate": GENERATING, "generating": GENERATING},
    **{"group": GENERATING, "reward": SCORING, "tool": SCORING, "teacher": SCORING},
}
_BY_TRACK = {
    **{"sync": SYNC, "group": GENERATING, "generate": GENERATING, "load": GENERATING, "evaluation": EVALUATION},
    **{"reward": SCORING, "tool": SCORING, "teacher": SCORING, "buffer": WAITING},
}
# Pixels of a row with one lane, and what each further lane adds.
ROW, LANE, MOST_ROW = 24, 6, 96
MARGINS = {"l": 96, "r": 16, "t": 26, "b": 30}
CONFIG = {"displayModeBar": False, "doubleClick": False}
# Characters of an argument that a bar shows.
CHARACTERS = 80


def figure_of(picture: Picture, since: float | None = None) -> dict[str, Any]:
    """A plotly figure: one trace of bars for each kind of work, rows from the top, and marks as vertical lines.

    Its axis shows the time of day, or the seconds after `since`.
    """
    at = milliseconds if since is None else lambda moment: moment - since
    tops, ticks, y = {}, [], 0.0
    for number, row in enumerate(picture.rows):
        height = _height(row)
        tops[number] = y
        ticks.append((y + height / 2, _lines([row.process, row.track])))
        y += height + 4
    traces: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(picture.rows):
        height = _height(row)
        for bar in row.bars:
            meaning = about(bar.name, row.track)
            trace = traces.setdefault(meaning, _new_trace(meaning))
            # The first lane is at the top of its row; a density stands on its bottom.
            low, high = (1 - bar.high, 1 - bar.low) if row.density else (bar.low, bar.high)
            start, end = max(bar.start, picture.start), min(bar.end, picture.end)
            trace["base"].append(at(start))
            trace["x"].append(at(end) - at(start))
            trace["y"].append(tops[number] + height * (low + high) / 2)
            # A pixel between lanes.
            trace["width"].append(height * (high - low) - (0 if row.density else 1))
            trace["hovertext"].append(_described(row, bar))
    layout = {
        "height": round(y) + MARGINS["t"] + MARGINS["b"],
        "autosize": True,
        "margin": MARGINS,
        "barmode": "overlay",
        "bargap": 0,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
        "xaxis": {
            "type": "date" if since is None else "linear",
            "range": [at(picture.start), at(picture.end)],
            "side": "bottom",
        },
        "yaxis": {
            "range": [max(1.0, y), 0],
            "fixedrange": True,
            "tickvals": [height for height, _ in ticks],
            "ticktext": [label for _, label in ticks],
            "tickfont": {"size": 10},
            "showgrid": False,
            "zeroline": False,
        },
        "shapes": [_line(at(mark.time), _colour_of_mark(mark), "dot") for mark in picture.marks],
    }
    marks = [_marks(picture.marks, at)] if picture.marks else []
    return {"data": [*traces.values(), *marks], "layout": layout, "config": CONFIG}


def still_figure(picture: Picture, since: float, cuts: Iterable[float] = ()) -> go.Figure:
    """The same for a report: with a legend, an axis of seconds after `since`, and lines at the times `cuts`."""
    spec = figure_of(picture, since)
    spec["layout"]["shapes"] += [_line(cut - since, figures.FAINT, "solid") for cut in cuts]
    look = {
        "font": {"family": figures.FONT, "size": 11, "color": figures.TEXT},
        "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": MARGINS | {"b": 40},
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        "dragmode": False,
        "meta": {"note": ""},
    }
    figure = go.Figure(spec["data"], spec["layout"] | look)
    return figure.update_xaxes(title="seconds", showgrid=False, zeroline=False)


def about(name: str, track: str = "") -> str:
    """The subject of a span, a key of `COLOURS`."""
    return _BY_NAME.get(name) or _BY_TRACK.get(track, TRAINING)


def _new_trace(name: str) -> dict[str, Any]:
    return {
        **{"type": "bar", "orientation": "h", "name": _lines([name]), "hoverinfo": "text", "textposition": "none"},
        **{"base": [], "x": [], "y": [], "width": [], "hovertext": []},
        "marker": {"color": COLOURS[name], "line": {"width": 0}},
    }


def _height(row: Track) -> int:
    lanes = 6 if row.density else round(row.peak)
    return min(MOST_ROW, ROW + LANE * max(0, lanes - 1))


def _line(at: float, colour: str, dash: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1, "dash": dash}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _marks(marks: list[Mark], at: Callable[[float], float]) -> dict[str, Any]:
    return {
        **{"type": "scatter", "mode": "markers", "cliponaxis": False, "hoverinfo": "text", "showlegend": False},
        "x": [at(mark.time) for mark in marks],
        "y": [0] * len(marks),
        "hovertext": [_lines([f"{mark.kind}: {mark.what}", _clipped(mark.text)]) for mark in marks],
        "marker": {
            "symbol": ["x" if mark.kind == "fault" else "diamond" for mark in marks],
            "color": [_colour_of_mark(mark) for mark in marks],
            "size": 9,
        },
    }


def _colour_of_mark(mark: Mark) -> str:
    return {"fault": RED, "recovery": GREEN}.get(mark.kind, PURPLE)


def _described(row: Track, bar: Bar) -> str:
    if row.density:
        return _lines([f"{row.process} {row.track}", f"mostly {bar.name}", f"{bar.count} spans", *_pairs(bar)])
    return _lines([f"{row.process} {row.track}", f"{bar.name}: {units.duration(bar.end - bar.start)}", *_pairs(bar)])


def _pairs(bar: Bar) -> list[str]:
    return [f"{name} {_clipped(str(value))}" for name, value in bar.args.items()]


def _lines(lines: list[str]) -> str:
    """Plotly reads a few tags in its texts: what a run recorded must not be one."""
    return "<br>".join(line.replace("&", "&amp;").replace("<", "&lt;") for line in lines if line)


def _clipped(value: str) -> str:
    return value if len(value) <= CHARACTERS else f"{value[:CHARACTERS]}..."


def milliseconds(moment: float) -> float:
    """Plotly shows dates as they are, so they are shifted to this machine's time zone."""
    return (moment + _zone(moment)) * 1e3


def parsed(date: str | float) -> float:
    """Seconds since the epoch of a date that plotly reports."""
    if isinstance(date, (int, float)):
        moment = date / 1e3
    else:
        moment = datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp()
    return moment - _zone(moment)


def _zone(moment: float) -> float:
    offset = datetime.fromtimestamp(moment).astimezone().utcoffset()
    return offset.total_seconds() if offset else 0.0
