"""Plotly figures on the page. Colours of text and lines come from page.css, so that figures follow light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nicegui import json, ui

from megasync.watch.elements import text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

CONFIG = {"displayModeBar": False, "doubleClick": "reset"}
HEIGHT = 260
TAG = re.compile(r"<[^>]*>")


class Chart:
    """A figure in the current container: `draw` gives it, or None while there is nothing to show.

    `update` draws it, and sends it only if it differs from what the browser has; `empty` says why there is none.
    """

    def __init__(self, draw: Callable[[], Figure | None], height: int = HEIGHT, empty: Callable[[], str] = str) -> None:
        self._draw = draw
        self._height = height
        self._empty = empty
        # None before the first update.
        self._sent: str | None = None
        self._plot: ui.plotly | None = None
        self._note = text("span", "")
        self._box = ui.element("div").classes("chart")

    @property
    def drawn(self) -> bool:
        """Whether there is a figure."""
        return self._plot is not None

    def update(self) -> None:
        figure = self._draw()
        title, note, options = ("", "", None) if figure is None else _parts(figure, self._height)
        empty = self._empty() if options is None else ""
        sent = empty if options is None else json.dumps(options)
        if sent == self._sent:
            return
        self._sent = sent
        if options is not None and self._plot is not None:
            self._plot.update_figure(options)
            self._note.say(note)
            return
        self._box.clear()
        with self._box:
            self._plot = None
            if options is not None:
                with ui.element("div").classes("chart-title"):
                    text("span", title)
                    self._note = text("span", note, "note")
                self._plot = ui.plotly(options).style(f"height: {self._height}px; width: 100%")
            elif empty:
                text("div", empty, "empty")


def chart_card(draw: Callable[[], Figure | None], width: str) -> Callable[[], bool]:
    """A chart in a card, which is there only while there is a figure. What updates it returns whether there is."""
    with ui.element("section").classes(f"card chart-card {width}") as section:
        chart = Chart(draw)

    def update() -> bool:
        chart.update()
        section.set_visibility(chart.drawn)
        return chart.drawn

    return update


def _parts(figure: Figure, height: int) -> tuple[str, str, dict[str, Any]]:
    """A figure without its title, and the title with the note behind it: they are text above the plot.

    Plotly makes room for a legend of several lines, but not for a title above it.
    """
    options = figure.to_plotly_json()
    layout = options["layout"]
    title, _, note = layout.pop("title", {}).get("text", "").partition("<span")
    # Plotly's default template is larger than most figures, and page.css has its colours.
    layout.pop("template", None)
    margin = {**layout.get("margin", {}), "t": 8}
    layout |= {"height": height, "autosize": True, "margin": margin}
    return title, TAG.sub("", f"<span{note}").strip(), {"data": options["data"], "layout": layout, "config": CONFIG}
