"""Still pictures of the Plotly figures of `figures`, as SVG or PNG: for paper, and for readers without JavaScript.

They show the same points, colours, dashes and levels. The colours of text and grid in an SVG are CSS variables.
"""

from __future__ import annotations

import base64
import io
import re
from html import unescape
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import PercentFormatter
from plotly.graph_objects import Figure

from megasync.watch.figures import FAINT, GRID, TEXT

# Sizes in inches: of a figure over the whole width, and of one of two side by side.
WIDE, HALF = (9.0, 2.9), (4.6, 2.8)
DPI = 130
# Pixels of a browser in an inch.
PIXELS = 96
# Room for the labels around the axes, in inches: left, right, bottom, top; and for each line of the legend.
MARGINS, LEGEND_LINE = (0.75, 0.1, 0.5, 0.22), 0.19
DASHES = {"dash": (0, (5, 2)), "dot": (0, (1.2, 1.6)), "dashdot": (0, (5, 2, 1.2, 2)), "longdash": (0, (9, 3))}
# `svg.hashsalt` makes equal figures equal files; text stays text, also between dollar signs.
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "megasync",
    "font.family": "sans-serif",
    "font.size": 9.5,
}


def picture(figure: Figure, kind: Literal["svg", "png"] = "svg", wide: bool = True, prefix: str = "") -> bytes:
    """`prefix` begins the ids within an SVG, which are unique on a page if it is.

    A figure without a title has its own height and margins, in pixels.
    """
    spec = figure.to_plotly_json()
    traces, layout = spec["data"], spec["layout"]
    with rc_context(SETTINGS):
        width, height = WIDE if wide else HALF
        left, right, below, above = MARGINS
        columns = 4 if wide else 2
        lines = -(-sum(trace.get("showlegend", True) for trace in traces) // columns)
        if "title" not in layout:
            left, right, below, above = (layout["margin"][side] / PIXELS for side in "lrbt")
            height = layout["height"] / PIXELS
        height, above = height + LEGEND_LINE * (lines - 1), above + LEGEND_LINE * lines
        drawn = Picture(figsize=(width, height), dpi=DPI)
        FigureCanvasAgg(drawn)
        room = (left / width, below / height, 1 - (left + right) / width, 1 - (below + above) / height)
        _draw(drawn.add_axes(room), traces, layout, columns)
        out = io.BytesIO()
        drawn.savefig(out, format=kind, transparent=kind == "svg", metadata={"Date": None} if kind == "svg" else None)
    return _embeddable(out.getvalue().decode(), prefix).encode() if kind == "svg" else out.getvalue()


def _draw(axis: Any, traces: list[dict[str, Any]], layout: dict[str, Any], columns: int) -> None:
    bottom: Any = 0.0
    for trace in traces:
        x, y = _array(trace["x"]), _array(trace["y"])
        look: dict[str, Any] = {"label": unescape(trace["name"])} if trace.get("showlegend", True) else {}
        if trace.get("orientation") == "h":
            _add_spans(axis, trace, x, y, look)
        elif trace["type"] == "bar":
            half = trace["width"] / 2
            edges = np.append(x - half, x[-1:] + half)
            below = np.broadcast_to(bottom, y.shape)
            axis.stairs(below + y, edges, baseline=below, fill=True, color=trace["marker"]["color"], **look)
            bottom = bottom + y
        elif trace.get("mode") == "markers":
            axis.scatter(x, y, s=22, c=trace["marker"]["color"], marker="X", clip_on=False, zorder=3)
        else:
            line, marked = trace["line"], "markers" in trace.get("mode", "lines")
            axis.plot(
                *(x, y),
                color=line["color"],
                linewidth=0.75 * line.get("width", 2),
                linestyle=DASHES.get(line.get("dash", "solid"), "-"),
                alpha=trace.get("opacity", 1),
                **({"marker": "o", "markersize": 3.5} if marked or len(x) == 1 else {}),
                **look,
            )
    for shape in layout.get("shapes", ()):
        if shape["yref"] == "paper":
            line = shape["line"]
            axis.axvline(shape["x0"], color=line["color"], linewidth=0.8, linestyle=DASHES.get(line["dash"], "-"))
        else:
            axis.axhline(shape["y0"], color=FAINT, linewidth=0.8, linestyle=DASHES["dash"])
    for note in layout.get("annotations", ()):
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "color": FAINT}
        axis.annotate(note["text"], (0.0, note["y"]), xytext=(3, 3), fontsize=8, **place)
    horizontal, vertical = layout["xaxis"], layout["yaxis"]
    axis.margins(x=0.01)
    axis.set_xlabel(horizontal["title"]["text"], color=TEXT)
    axis.set_ylabel(vertical.get("title", {}).get("text", ""), color=TEXT)
    if "range" in horizontal:
        axis.set_xlim(*horizontal["range"])
    if vertical.get("tickformat") == ".0%":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if "range" in vertical:
        axis.set_ylim(*vertical["range"])
    elif vertical.get("rangemode") == "tozero":
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), max(0.0, axis.get_ylim()[1]))
    if "tickvals" in vertical:
        axis.set_yticks(vertical["tickvals"], labels=map(unescape, vertical["ticktext"]), fontsize=8)
    if vertical.get("showgrid", True):
        axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=TEXT, length=0)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns, "borderaxespad": 0.2}
    axis.legend(fontsize=8, frameon=False, labelcolor=TEXT, handlelength=1.6, **place)


def _add_spans(axis: Any, trace: dict[str, Any], x: Any, y: Any, look: dict[str, Any]) -> None:
    """Horizontal bars, each with its own start, height and place."""
    start, half = _array(trace["base"]), _array(trace["width"]) / 2
    left, right, low, high = start, start + x, y - half, y + half
    corners = np.stack([np.stack(corner, -1) for corner in ((left, low), (right, low), (right, high), (left, high))], 1)
    axis.add_collection(PolyCollection([*corners], color=trace["marker"]["color"], linewidth=0.25, **look))


def _array(values: Any) -> Any:
    """Numbers of a trace; Plotly keeps them as an array, or encoded."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    return np.asarray(values)


def _embeddable(text: str, prefix: str) -> str:
    """An <svg> element that shares a page with others: without a style for the whole page, and with ids of its own."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
    text = text.replace(TEXT, "var(--ink)").replace(FAINT, "var(--faint)").replace(GRID, "var(--rule)")
    # Text between tags, which a run may have recorded, stays as it is.
    text = re.sub("<[^>]*>", lambda tag: _trimmed(tag[0]), text)
    # Its size is that of its frame; the view box keeps the proportions.
    head, rest = text.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", head) + ">" + rest


def _trimmed(tag: str) -> str:
    """Without the font, which the page has, with places to a hundredth of a pixel, and not turned by nothing."""
    tag = re.sub(r'font-family: [^;"]*; | transform="rotate\(-0 [^"]*"', "", tag)
    return re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), tag)
