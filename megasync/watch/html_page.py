"""A document as one HTML file that loads nothing: readable without JavaScript, printable, light and dark.

Every figure stands there as a still SVG. Where JavaScript runs, a figure becomes a live one once it is scrolled into
view; on paper, and where that fails, it is the still one. Plotly, which draws the live ones, and their data are in the
file as compressed text, which the browser inflates when the first figure is due. The page's own policy forbids every
request, and every text is escaped, so that nothing which a run recorded can act.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path

from plotly.offline import get_plotlyjs

from megasync.watch.document import (
    Block,
    Cell,
    Chart,
    Document,
    Facts,
    Number,
    Section,
    Table,
    Text,
    Tokens,
    Verbatim,
    Writer,
    printable,
)
from megasync.watch.picture import picture
from megasync.watch.responses import Shading

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))


def render_html(document: Document) -> str:
    """The whole file; more than 2 MB if it has figures, since Plotly is part of it."""
    writer = _Html()
    body = "\n".join(writer.parts(document))
    data = json.dumps([json.loads(chart.figure.to_json() or "{}") for chart in writer.charts], separators=(",", ":"))
    packed = {"plotly": _plotly(), "figures": _packed(data)} if writer.charts else {}
    scripts = "".join(f'<script type="text/plain" id="{name}">{text}</script>\n' for name, text in packed.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(document.title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
{scripts}<script>{SCRIPT}</script>
</body>
</html>
"""


class _Html(Writer):
    """Counts tables and figures through the document, and collects the figures that become live ones."""

    def __init__(self) -> None:
        self.charts: list[Chart] = []
        self._tables = 0

    def head(self, document: Document) -> str:
        status = _text(document.status)
        chip = f' <span class="status {status}">{status}</span>' if status else ""
        return (
            f'<header><h1>{_text(document.title)}{chip}</h1><p class="subtitle">{_text(document.subtitle)}</p>'
            f'<p class="abstract">{_text(document.abstract)}</p></header>'
        )

    def notes(self, notes: Sequence[str]) -> str:
        items = "".join(f"<li>{_text(note)}</li>" for note in notes)
        return f'<aside class="notes"><strong>What is missing.</strong><ul>{items}</ul></aside>'

    def readings(self, rows: Sequence[tuple[str, Cell, str]]) -> str:
        cells = "".join(
            f'<div><dt>{_text(name)}</dt><dd>{_cell(value)}<span class="note">{_text(note)}</span></dd></div>'
            for name, value, note in rows
        )
        return f'<dl class="readings">{cells}</dl>'

    def section(self, number: int, section: Section) -> Iterator[str]:
        yield f'<section><h2 id="s{number}"><span class="count">{number}</span> {_text(section.title)}</h2>'
        for charts, blocks in groupby(paired(section.blocks), lambda block: isinstance(block, Chart)):
            yield '<div class="charts">' if charts else "<div>"
            yield from map(self.block, blocks)
            yield "</div>"
        yield "</section>"

    def text(self, block: Text) -> str:
        return f"<p>{_text(block.text)}</p>"

    def verbatim(self, block: Verbatim) -> str:
        return f"<pre><code>{_text(block.text)}</code></pre>"

    def facts(self, block: Facts) -> str:
        cells = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in block.rows)
        return f'<dl class="facts">{cells}</dl>'

    def chart(self, block: Chart) -> str:
        self.charts.append(block)
        count, caption, look = len(self.charts), _text(block.caption), " wide" if block.wide else ""
        still = picture(block.figure, wide=block.wide, prefix=f"figure{count}").decode()
        return (
            f'<figure class="chart{look}"><div class="still" role="img" aria-label="{caption}">{still}</div>'
            f'<div class="live" data-figure="{count - 1}"></div>'
            f"<figcaption><b>Figure {count}.</b> {caption}</figcaption></figure>"
        )

    def table(self, block: Table) -> str:
        self._tables += 1
        numeric = [any(isinstance(row[at], Number) for row in block.rows) for at in range(len(block.headings))]
        looks = [
            ' class="number"' if number else ' class="text"' if heading in block.texts else ""
            for heading, number in zip(block.headings, numeric, strict=True)
        ]
        head = "".join(f"<th{look}>{_text(text)}</th>" for text, look in zip(block.headings, looks, strict=True))
        rows = "".join(
            "<tr>" + "".join(f"<td{look}>{_cell(cell)}</td>" for cell, look in zip(row, looks, strict=True)) + "</tr>"
            for row in block.rows
        )
        inner = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        caption = f"<b>Table {self._tables}.</b> {_text(block.caption)}"
        if block.folded:
            return f'<details class="table"><summary>{caption}</summary>{inner}</details>'
        return f'<figure class="table"><figcaption>{caption}</figcaption>{inner}</figure>'

    def tokens(self, block: Tokens) -> str:
        views = "".join(
            f'<p class="legend">{_text(name)}{_legend(shading)}</p><div class="tokens">'
            + "".join(
                f'<span title="{_text(about)}"{"" if generated else _GIVEN}{_shade(float(shade))}>{_text(piece)}</span>'
                for piece, about, generated, shade in zip(
                    block.pieces, block.about, block.generated, shading.shades, strict=True
                )
            )
            + "</div>"
            for name, shading in block.shadings.items()
        )
        return f'<figure class="response"><figcaption>{_text(block.caption)}</figcaption>{views}</figure>'


def paired(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks; a chart that has no neighbour to stand beside becomes wide."""
    blocks_in_rows: list[Block] = []
    for narrow, blocks_of_kind in groupby(blocks, lambda block: isinstance(block, Chart) and not block.wide):
        row = list(blocks_of_kind)
        if narrow and len(row) % 2:
            last = row.pop()
            assert isinstance(last, Chart)
            row.append(replace(last, wide=True))
        blocks_in_rows += row
    return blocks_in_rows


_GIVEN = ' class="given"'
# Share of a full colour, so that text stays readable on it.
STRENGTH = 60


def _shade(shade: float) -> str:
    """The background of a token, by a shade from -1 to 1; none if it is not known."""
    strength = 0 if math.isnan(shade) else round(STRENGTH * min(1.0, abs(shade)))
    side = "below" if shade < 0 else "above"
    return f' style="background:color-mix(in srgb,var(--{side}) {strength}%,transparent)"' if strength else ""


def _legend(shading: Shading) -> str:
    sides = ((shading.below, -1.0), (shading.above, 1.0))
    return "".join(f"<span><i{_shade(side)}></i>{_text(label)}</span>" for label, side in sides if label)


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, Number):
        return f'<data value="{cell.value!r}">{_text(cell.text)}</data>'
    return _text(cell)


def _text(text: str) -> str:
    return escape(printable(text))


@cache
def _plotly() -> str:
    return _packed(get_plotlyjs())


def _packed(text: str) -> str:
    """Compressed, as letters and digits, of which none can end an element. Equal texts are packed alike."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
