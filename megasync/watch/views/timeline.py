"""The timeline: what every process did when, from the whole run to a step to one group.

The model (`watch.timeline`) bounds what is drawn, and the browser is sent one window at a time: dragging over the chart
asks for the bars of that window. Spans are read and pictures are made in a thread, one at a time (`_Traces`), because a
long run has a million spans.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from nicegui import background_tasks, ui
from nicegui import run as threads
from nicegui.events import GenericEventArguments

from megasync.observe.spans import TraceReader
from megasync.observe.trace import TRACE_FOLDER
from megasync.watch import units
from megasync.watch.elements import Shares, card, text, trouble
from megasync.watch.run_folder import RunFolder
from megasync.watch.timeline import OTHER, Bar, Life, Mark, Picture, Row, Step, Timeline
from megasync.watch.view import Place, Update

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GRAY = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b5a800", "#98a1ad"),
)
# Colours of the usual spans; others take theirs from `PALETTE` by their names.
COLOURS = {
    **{"train": BLUE, "forward_backward": BLUE, "step": BLUE, "group": SKY, "generate": GREEN, "publish": ORANGE},
    **{"wait for groups": GRAY, OTHER: GRAY, "finished": GRAY, "buffer": GRAY, "pause": RED, "restart": RED},
    **{"checkpoint": PURPLE, "save": PURPLE, "evaluation": PURPLE, "optimizer": SKY, "load": YELLOW, "score": GREEN},
    **{"stage": SKY, "commit": ORANGE, "send": ORANGE, "connect": YELLOW, "verify": GREEN, "tool": PURPLE},
    **{"reward": YELLOW, "teacher": SKY},
}
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)
# Pixels of a row with one lane, and what each further lane adds.
ROW, LANE, MOST_ROW = 24, 6, 96
MARGINS = {"l": 190, "r": 16, "t": 26, "b": 30}
CONFIG = {"displayModeBar": False, "doubleClick": False}
# Of a trace that are read: some 700,000 spans, which take two seconds.
MOST_BYTES = 128 * 2**20
# Groups of a step that are offered, and characters of an argument that a bar shows.
GROUPS, CHARACTERS = 64, 80


def build(run: RunFolder, place: Place) -> Update:
    """Draws the timeline of a run. The query may have ``step`` or ``uid``, which it opens at."""
    troubles = trouble(run)
    view = _View(run, place)

    def update() -> None:
        troubles()
        view.update()

    return update


class _Traces:
    """The trace of one run, shared by all browsers."""

    def __init__(self, run: RunFolder) -> None:
        self._reader = TraceReader(run.path, MOST_BYTES)
        self._lock = threading.Lock()
        self.timeline = Timeline()

    def ask(self, step: int | None, uid: str, window: tuple[float, float] | None) -> _Answer:
        """Reads on, then answers; for a thread."""
        with self._lock:
            timeline = self.timeline
            timeline.add(self._reader.update())
            if not len(timeline):
                return _Answer()
            steps = timeline.steps()
            chosen = next((each for each in reversed(steps) if each.number == step), None)
            life = timeline.life(uid) if uid else None
            if window is None:
                if life is not None:
                    window = life.spans[0].start, max(span.end for span in life.spans)
                elif chosen is not None:
                    window = chosen.start, chosen.end
                else:
                    window = timeline.start, timeline.end
            margin = 0.01 * max(1e-3, window[1] - window[0])
            picture = timeline.picture(window[0] - margin, window[1] + margin)
            groups = timeline.groups_of(chosen.number) if chosen else []
            last = steps[-1].number if steps else 0
            return _Answer(picture, chosen, groups, life, last, self._reader.partial)


@dataclass(frozen=True)
class _Answer:
    """What the view shows. `last` is the newest step; `partial` is whether an older part of the trace was left out."""

    picture: Picture | None = None
    step: Step | None = None
    groups: list[str] = field(default_factory=list[str])
    life: Life | None = None
    last: int = 0
    partial: bool = False


_TRACES: WeakKeyDictionary[RunFolder, _Traces] = WeakKeyDictionary()


class _View:
    """What one browser shows of one run."""

    def __init__(self, run: RunFolder, place: Place) -> None:
        self._place = place
        self._traces = _TRACES.setdefault(run, _Traces(run))
        self._step: int | None = int(place.query["step"]) if place.query.get("step", "").isdecimal() else None
        self._uid = place.query.get("uid", "")
        self._window: tuple[float, float] | None = None
        self._last = 0
        self._sent: dict[str, Any] | None = None
        self._detailed: object = None
        self._named: list[str] = []
        self._plot: ui.plotly | None = None
        self._busy = self._again = False
        with ui.element("div").classes("pile"):
            with card("Timeline", "drag to zoom in, double click to see the whole run"):
                with ui.element("div").classes("filters"):
                    with ui.element("div").style("width: auto"):
                        ui.button("whole run", on_click=self._whole).props("flat dense no-caps")
                        ui.button("previous step", on_click=partial(self._turn, -1)).props("flat dense no-caps")
                        ui.button("next step", on_click=partial(self._turn, 1)).props("flat dense no-caps")
                    self._number = ui.input("step", value=place.query.get("step", "")).props(
                        "dense outlined type=number"
                    )
                    self._number.on("keydown.enter", lambda: self._go(self._number.value))
                    self._group = ui.input("group", value=self._uid).props("dense outlined clearable")
                    self._group.on("keydown.enter", lambda: self._follow(str(self._group.value or "")))
                self._note = text("div", "", "note")
                self._chart = ui.element("div").classes("chart")
                with self._chart:
                    self._empty = text("div", "Reading the trace...", "empty")
                self._legend = ui.element("div").classes("legend")
            self._details = ui.element("div").classes("pile")
        ui.timer(0.01, self._refresh, once=True)

    def update(self) -> None:
        background_tasks.create(self._refresh(), name="timeline")

    # Where it looks

    async def _whole(self) -> None:
        await self._show(None, "")

    async def _turn(self, by: int) -> None:
        await self._go((self._last if by < 0 else 1) if self._step is None else self._step + by)

    async def _go(self, step: Any) -> None:
        if step not in (None, ""):
            await self._show(max(1, min(int(step), self._last)), "")

    async def _follow(self, uid: str) -> None:
        await self._show(self._step, uid)

    async def _show(self, step: int | None, uid: str) -> None:
        self._step, self._uid, self._window = step, uid, None
        self._number.value = "" if step is None else str(step)
        self._group.value = uid
        await self._refresh()

    async def _zoomed(self, event: GenericEventArguments) -> None:
        low, high = event.args.get("xaxis.range[0]"), event.args.get("xaxis.range[1]")
        if low and high:
            self._window = _parsed(low), _parsed(high)
            await self._refresh()

    # Drawing

    async def _refresh(self) -> None:
        """One at a time; what is asked for meanwhile is drawn afterwards."""
        self._again = True
        if self._busy:
            return
        self._busy = True
        try:
            while self._again:
                self._again = False
                answer = await threads.io_bound(self._traces.ask, self._step, self._uid, self._window)
                self._draw(answer)
        finally:
            self._busy = False

    def _draw(self, answer: _Answer | None) -> None:
        if answer is None or self._chart.is_deleted:
            return
        self._last = answer.last
        self._note.say(f"The newest {units.size(MOST_BYTES)} of a larger trace." if answer.partial else "")
        if answer.picture is None:
            self._empty.say(f"There is no trace: {TRACE_FOLDER}/ is missing or empty (observe.trace).")
            return
        figure = figure_of(answer.picture)
        if figure != self._sent:
            self._sent = figure
            if self._plot is None:
                self._chart.clear()
                with self._chart:
                    self._plot = ui.plotly(figure).style("width: 100%")
                    self._plot.on("plotly_relayout", self._zoomed, ["xaxis.range[0]", "xaxis.range[1]"])
                    self._plot.on("plotly_doubleclick", self._whole, [])
            else:
                self._plot.update_figure(figure)
            self._plot.style(f"height: {figure['layout']['height']}px")
            self._draw_legend(answer.picture)
        details = (answer.step, answer.groups, answer.life)
        if details == self._detailed:
            return
        self._detailed = details
        self._details.clear()
        with self._details:
            if answer.life is not None:
                self._draw_life(answer.life)
            if answer.step is not None:
                self._draw_step(answer.step, answer.groups)

    def _draw_legend(self, picture: Picture) -> None:
        names = list(dict.fromkeys(bar.name for row in picture.rows for bar in row.bars))
        if names == self._named:
            return
        self._named = names
        self._legend.clear()
        with self._legend:
            for name in names:
                with ui.element("span").classes("item"):
                    ui.element("span").classes("swatch").style(f"background: {colour_of(name)}")
                    text("span", name)

    def _draw_step(self, step: Step, groups: list[str]) -> None:
        with card(f"Step {step.number}", f"{units.duration(step.seconds)} since the end of the one before"):
            _shares(step.phases, step.seconds)
            if step.of_train:
                text("div", "Training, on the first rank", "row-name")
                _shares(step.of_train, sum(step.of_train.values()))
            if groups:
                text("div", f"Its {len(groups)} groups", "row-name")
                with ui.element("div").classes("legend"):
                    for uid in groups[:GROUPS]:
                        text("a", uid, "mono").props["href"] = self._place.link("timeline", step=step.number, uid=uid)
                    if len(groups) > GROUPS:
                        text("span", f"and {len(groups) - GROUPS} more")

    def _draw_life(self, life: Life) -> None:
        start, end = life.spans[0].start, max(span.end for span in life.spans)
        outcome = f"trained in step {life.step}" if life.step is not None else life.outcome or "not finished"
        with card(f"Group {life.uid}", f"{outcome}; {units.duration(end - start)} from its prompt"):
            _shares(life.phases, end - start)
            alone = Timeline()
            alone.add(life.spans)
            figure = figure_of(alone.picture(start, end))
            ui.plotly(figure).style(f"width: 100%; height: {figure['layout']['height']}px")
            text("a", "its responses").props["href"] = self._place.link("rollouts", uid=life.uid)


def _shares(phases: Mapping[str, float], whole: float) -> None:
    order = sorted(phases, key=lambda name: (name == OTHER, -phases[name]))
    Shares(units.duration).show({name: (phases[name], colour_of(name)) for name in order}, whole)


# The figure


def figure_of(picture: Picture) -> dict[str, Any]:
    """A plotly figure: one trace of bars for each name, rows from the top, and marks as vertical lines."""
    tops, ticks, y = {}, [], 0.0
    for number, row in enumerate(picture.rows):
        height = _height(row)
        tops[number] = y
        ticks.append((y + height / 2, f"{row.process}  {row.track}"))
        y += height + 4
    traces: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(picture.rows):
        height = _height(row)
        for bar in row.bars:
            trace = traces.setdefault(bar.name, _new_trace(bar.name))
            # The first lane is at the top of its row; a density stands on its bottom.
            low, high = (1 - bar.high, 1 - bar.low) if row.density else (bar.low, bar.high)
            start, end = max(bar.start, picture.start), min(bar.end, picture.end)
            trace["base"].append(_milliseconds(start))
            trace["x"].append((end - start) * 1e3)
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
            "type": "date",
            "range": [_milliseconds(picture.start), _milliseconds(picture.end)],
            "side": "bottom",
        },
        "yaxis": {
            "range": [max(1.0, y), 0],
            "fixedrange": True,
            "tickvals": [at for at, _ in ticks],
            "ticktext": [label for _, label in ticks],
            "showgrid": False,
            "zeroline": False,
        },
        "shapes": [_line(mark) for mark in picture.marks],
    }
    marks = [_marks(picture.marks)] if picture.marks else []
    return {"data": [*traces.values(), *marks], "layout": layout, "config": CONFIG}


def _new_trace(name: str) -> dict[str, Any]:
    return {
        **{"type": "bar", "orientation": "h", "name": name, "hoverinfo": "text", "textposition": "none"},
        **{"base": [], "x": [], "y": [], "width": [], "hovertext": []},
        "marker": {"color": colour_of(name), "line": {"width": 0}},
    }


def _height(row: Row) -> int:
    lanes = 6 if row.density else round(row.peak)
    return min(MOST_ROW, ROW + LANE * max(0, lanes - 1))


def _line(mark: Mark) -> dict[str, Any]:
    at = _milliseconds(mark.time)
    line = {"color": _colour_of_mark(mark), "width": 1, "dash": "dot"}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _marks(marks: list[Mark]) -> dict[str, Any]:
    return {
        **{"type": "scatter", "mode": "markers", "cliponaxis": False, "hoverinfo": "text"},
        "x": [_milliseconds(mark.time) for mark in marks],
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


def colour_of(name: str) -> str:
    """The colour of spans of this name; always the same."""
    return COLOURS.get(name) or PALETTE[sum(name.encode()) % len(PALETTE)]


def _described(row: Row, bar: Bar) -> str:
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


def _milliseconds(moment: float) -> float:
    """Plotly shows dates as they are, so they are shifted to this machine's time zone."""
    return (moment + _zone(moment)) * 1e3


def _parsed(date: str | float) -> float:
    """Seconds since the epoch of a date that plotly reports."""
    if isinstance(date, (int, float)):
        moment = date / 1e3
    else:
        moment = datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp()
    return moment - _zone(moment)


def _zone(moment: float) -> float:
    offset = datetime.fromtimestamp(moment).astimezone().utcoffset()
    return offset.total_seconds() if offset else 0.0
