"""The timeline: what every process did when, from the whole run to a step to one group.

The model (`watch.timeline`) bounds what is drawn, and the browser is sent one window at a time: dragging over the chart
asks for the bars of that window. Spans are read and pictures are made in a thread, one at a time (`_Traces`), because a
long run has a million spans.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from nicegui import background_tasks, ui
from nicegui import run as threads
from nicegui.events import GenericEventArguments

from megasync.observe.trace import TRACE_FOLDER
from megasync.watch import units
from megasync.watch.elements import Shares, card, swatch, text, trouble
from megasync.watch.growing_file import PIECE
from megasync.watch.run_folder import ACTIVE, RunFolder
from megasync.watch.spans import TraceReader
from megasync.watch.timeline import MOST_BYTES, OTHER, Life, Picture, Step, Timeline
from megasync.watch.timeline_figure import COLOURS, about, figure_of, parsed
from megasync.watch.view import Place, Update

# Groups of a step that are offered.
GROUPS = 64


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
        self._run_dir = run.path
        self._reader = TraceReader(run.path, MOST_BYTES)
        self._lock = threading.Lock()
        self.timeline = Timeline()

    def ask(self, step: int | None, uid: str, window: tuple[float, float] | None) -> _Answer:
        """Reads on, then answers; for a thread."""
        with self._lock:
            # The run removes its oldest segments, and a timeline cannot forget: it is read anew from what is left.
            if self._reader.taken > 2 * min(MOST_BYTES, self._reader.stored()) + PIECE:
                self._reader, self.timeline = TraceReader(self._run_dir, MOST_BYTES), Timeline()
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
    """Contents of the view. `last` is the newest step; `partial` is whether an older part of the trace was left out."""

    picture: Picture | None = None
    step: Step | None = None
    groups: list[str] = field(default_factory=list[str])
    life: Life | None = None
    last: int = 0
    partial: bool = False


_TRACES: WeakKeyDictionary[RunFolder, _Traces] = WeakKeyDictionary()


class _View:
    """The timeline of one run in one browser."""

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
        self._run = run
        self._busy = self._again = False
        with ui.element("div").classes("pile"):
            with card("Timeline", "drag to zoom in, double click to see the whole run"):
                with ui.element("div").classes("filters") as self._controls:
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
            self._window = parsed(low), parsed(high)
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
        self._controls.set_visibility(answer.picture is not None)
        if answer.picture is None:
            self._empty.say(_no_trace(self._run))
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
        subjects = {about(bar.name, row.track) for row in picture.rows for bar in row.bars}
        names = [name for name in COLOURS if name in subjects]
        if names == self._named:
            return
        self._named = names
        self._legend.clear()
        with self._legend:
            for name in names:
                swatch(name, COLOURS[name])

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


def _no_trace(run: RunFolder) -> str:
    if run.settings.get("observe.trace") is False:
        return "This run has no trace: observe.trace is false."
    if run.status in ACTIVE:
        return "No trace yet: it comes with what the processes do first."
    return f"This run has no trace: {TRACE_FOLDER}/ is missing or empty."


def _shares(phases: Mapping[str, float], total: float) -> None:
    order = sorted(phases, key=lambda name: (name == OTHER, -phases[name]))
    Shares(units.duration).show({name: (phases[name], COLOURS[about(name)]) for name in order}, total)
