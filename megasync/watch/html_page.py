"""A document as one HTML file that loads nothing: readable without JavaScript, printable, light and dark.

Every figure stands there as a still SVG. Where JavaScript runs, a figure becomes a live one of Plotly once it is
scrolled into view; on paper it is the still one again. The page's own policy forbids every request, and every text is
escaped, so that nothing which a run recorded can act.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from pathlib import Path

from plotly.offline import get_plotlyjs

from megasync.watch.document import (
    Block,
    Cell,
    Chart,
    Commands,
    Document,
    Facts,
    Number,
    Table,
    Text,
    printable,
)
from megasync.watch.picture import picture

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))


def render_html(document: Document) -> str:
    """The whole file; about 5 MB, since Plotly is part of it."""
    figures: list[Chart] = []
    numbers = _Numbers()
    body = "\n".join(_body(document, figures, numbers))
    data = json.dumps([json.loads(chart.figure.to_json() or "{}") for chart in figures], separators=(",", ":"))
    plotly = f"<script>{get_plotlyjs()}</script>" if figures else ""
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
{body}
{plotly}
<script type="application/json" id="figures">{_json_in_html(data)}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


class _Numbers:
    """Counts tables and figures through the document."""

    def __init__(self) -> None:
        self._counts = {"Table": 0, "Figure": 0}

    def next(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind} {self._counts[kind]}"


def _body(document: Document, figures: list[Chart], numbers: _Numbers) -> Iterator[str]:
    status = f'<span class="status {_text(document.status)}">{_text(document.status)}</span>' if document.status else ""
    yield f"<header><h1>{_text(document.title)} {status}</h1>"
    yield f'<p class="subtitle">{_text(document.subtitle)}</p>'
    yield f'<p class="abstract">{_text(document.abstract)}</p></header>'
    if document.notes:
        yield '<aside class="notes"><strong>What is missing.</strong><ul>'
        yield from (f"<li>{_text(note)}</li>" for note in document.notes)
        yield "</ul></aside>"
    cells = "".join(
        f'<div><dt>{_text(name)}</dt><dd>{_cell(value)}<span class="note">{_text(note)}</span></dd></div>'
        for name, value, note in document.readings.rows
    )
    if cells:
        yield f'<dl class="readings">{cells}</dl>'
    yield "<main>"
    for number, section in enumerate(document.shown, 1):
        yield f'<section><h2 id="s{number}"><span class="count">{number}</span> {_text(section.title)}</h2>'
        for charts, blocks in groupby(paired(section.blocks), lambda block: isinstance(block, Chart)):
            yield '<div class="charts">' if charts else "<div>"
            yield from (_block(block, figures, numbers) for block in blocks)
            yield "</div>"
        yield "</section>"
    yield "</main>"


def paired(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks; a chart that has no neighbour to stand beside becomes wide."""
    found: list[Block] = []
    for narrow, blocks_of_kind in groupby(blocks, lambda block: isinstance(block, Chart) and not block.wide):
        row = list(blocks_of_kind)
        if narrow and len(row) % 2:
            last = row.pop()
            assert isinstance(last, Chart)
            row.append(replace(last, wide=True))
        found += row
    return found


def _block(block: Block, figures: list[Chart], numbers: _Numbers) -> str:
    match block:
        case Text(text):
            return f"<p>{_text(text)}</p>"
        case Commands(text):
            return f"<pre><code>{_text(text)}</code></pre>"
        case Facts(rows):
            cells = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in rows)
            return f'<dl class="facts">{cells}</dl>'
        case Chart(caption, figure, wide):
            figures.append(block)
            still = picture(figure, wide=wide, prefix=f"figure{len(figures)}").decode()
            name = numbers.next("Figure")
            look, described = " wide" if wide else "", _text(caption)
            return (
                f'<figure class="chart{look}"><div class="still" role="img" aria-label="{described}">{still}</div>'
                f'<div class="live" data-figure="{len(figures) - 1}"></div>'
                f"<figcaption><b>{name}.</b> {described}</figcaption></figure>"
            )
        case Table():
            return _table(block, numbers.next("Table"))


def _table(table: Table, name: str) -> str:
    numeric = [any(isinstance(row[at], Number) for row in table.rows) for at in range(len(table.headings))]
    classes = [
        ' class="number"' if number else ' class="text"' if heading in table.texts else ""
        for heading, number in zip(table.headings, numeric, strict=True)
    ]
    head = "".join(f"<th{look}>{_text(text)}</th>" for text, look in zip(table.headings, classes, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{look}>{_cell(cell)}</td>" for cell, look in zip(row, classes, strict=True)) + "</tr>"
        for row in table.rows
    )
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    caption = f"<b>{name}.</b> {_text(table.caption)}"
    if table.folded:
        return f'<details class="table"><summary>{caption}</summary><div class="scroll">{inner}</div></details>'
    return f'<figure class="table"><figcaption>{caption}</figcaption><div class="scroll">{inner}</div></figure>'


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, Number):
        return f'<data value="{cell.value!r}">{_text(cell.text)}</data>'
    return _text(cell)


def _text(text: str) -> str:
    return escape(printable(text))


def _json_in_html(text: str) -> str:
    """JSON that no browser reads as the end of its script element."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
