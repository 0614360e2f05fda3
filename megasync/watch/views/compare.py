"""Several runs against each other: outcomes, curves on a common axis, what a threshold took, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nicegui import ui
from plotly.graph_objects import Figure

from megasync.watch import comparison, figures, units
from megasync.watch.chart import chart_card
from megasync.watch.document import Cell, Number
from megasync.watch.document import Table as Rows
from megasync.watch.elements import Table, card, swatch, text
from megasync.watch.run_folder import RunFolder
from megasync.watch.view import Place, Update, together

AXES = {"step": "Steps", "tokens": "Tokens", "time": "Time"}


def build(runs: Sequence[RunFolder], place: Place) -> Update | None:
    """Draws the runs that are open together."""
    if len(runs) < 2:
        text("p", "Choose several runs in the list of runs to compare them.", "empty")
        return None
    chosen = {"axis": place.query.get("axis", "step")}
    if chosen["axis"] not in AXES:
        chosen["axis"] = "step"
    charts: list[Callable[[], object]] = []

    def drawn(draw: figures.Draw) -> Figure | None:
        return figures.without_legend(draw(runs, chosen["axis"]))

    with ui.element("div").classes("grid"):
        tables = [_table("Outcomes", lambda: comparison.outcomes(runs))]
        with card("Curves", "by", "all"):
            ui.toggle(AXES, value=chosen["axis"], on_change=lambda event: turn(event.value)).props("dense no-caps")
            with ui.element("div").classes("legend"):
                for name, colour in figures.colours_of(runs).items():
                    swatch(name, colour)
        for number, draw in enumerate(figures.COMPARABLE.values()):
            charts.append(chart_card(partial(drawn, draw), "all" if number == 0 else "half"))
        tables.append(
            _table("What it took", lambda: _times(runs), "None of these runs has measured a score or a loss.")
        )
        same = "No setting that is known of these runs differs."
        tables.append(_table("Settings that differ", lambda: comparison.settings_table(runs), same))

    def turn(axis: str) -> None:
        chosen["axis"] = axis
        for chart in charts:
            chart()

    return together([*tables, *charts])


def _times(runs: Sequence[RunFolder]) -> Rows | None:
    goal = comparison.goal_of(runs)
    return None if goal is None else comparison.times_to(runs, goal)


def _table(title: str, rows: Callable[[], Rows | None], none: str = "") -> Update:
    with card(title, width="all"):
        box = ui.element("div")
        empty = text("div", "", "empty")
    table: list[Table] = []

    def update() -> None:
        content = rows()
        empty.say("" if content is not None and content.rows else none)
        if content is None or not content.rows:
            return
        if not table:
            numbers = [
                heading
                for at, heading in enumerate(content.headings)
                if any(isinstance(row[at], Number) for row in content.rows)
            ]
            with box:
                table.append(Table(content.headings, numbers))
        table[0].show([[_cell(cell) for cell in row] for row in content.rows])

    return update


def _cell(cell: Cell) -> str:
    return units.NOTHING if cell is None else cell.text if isinstance(cell, Number) else cell
