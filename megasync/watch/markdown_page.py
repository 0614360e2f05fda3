"""A document as GitHub's Markdown, with its figures as PNG files in a folder beside it.

Every text is escaped, so that nothing which a run recorded becomes markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from megasync.watch.document import (
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

_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|~$])")


def render_markdown(document: Document, folder: str) -> tuple[str, dict[str, bytes]]:
    """The text, and the pictures by their file names; the text expects these in `folder` beside it."""
    writer = _Markdown(folder)
    return "\n\n".join(writer.parts(document)) + "\n", writer.pictures


class _Markdown(Writer):
    """Collects the pictures that the text names."""

    def __init__(self, folder: str) -> None:
        self.pictures: dict[str, bytes] = {}
        self._folder = folder

    def head(self, document: Document) -> str:
        about = " · ".join(_text(part) for part in (document.status, document.subtitle) if part)
        return f"# {_text(document.title)}\n\n{about}\n\n{_text(document.abstract)}"

    def notes(self, notes: Sequence[str]) -> str:
        return "**What is missing.**\n\n" + "\n".join(f"- {_text(note)}" for note in notes)

    def readings(self, rows: Sequence[tuple[str, Cell, str]]) -> str:
        return _rows(("", "", ""), rows, (False, True, False))

    def section(self, number: int, section: Section) -> Iterator[str]:
        yield f"## {number} {_text(section.title)}"
        yield from map(self.block, section.blocks)

    def text(self, block: Text) -> str:
        return _text(block.text)

    def verbatim(self, block: Verbatim) -> str:
        # The fence is longer than any within.
        longest = max((len(run) for run in re.findall("`+", block.text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}{block.language}\n{printable(block.text)}\n{fence}"

    def facts(self, block: Facts) -> str:
        return _rows(("", ""), block.rows, (False, False))

    def chart(self, block: Chart) -> str:
        name, caption = f"figure-{len(self.pictures) + 1}.png", _text(block.caption)
        self.pictures[name] = picture(block.figure, "png", block.wide)
        return f"![{caption}]({Path(self._folder, name).as_posix().replace(' ', '%20')})\n\n*{caption}*"

    def table(self, block: Table) -> str:
        numeric = [any(isinstance(row[at], Number) for row in block.rows) for at in range(len(block.headings))]
        table, caption = _rows(block.headings, block.rows, numeric), _text(block.caption)
        if block.folded:
            return f"<details><summary>{caption}</summary>\n\n{table}\n\n</details>"
        return f"**{caption}**\n\n{table}"

    def tokens(self, block: Tokens) -> str:
        return f"**{_text(block.caption)}**\n\n{self.verbatim(Verbatim(''.join(block.pieces)))}"


def _rows(headings: Sequence[str], rows: Sequence[Sequence[Cell]], numeric: Sequence[bool]) -> str:
    lines = [
        [_text(heading) for heading in headings],
        ["---:" if number else "---" for number in numeric],
        *([_cell(cell) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    return _text(cell.text if isinstance(cell, Number) else cell)


def _text(text: str) -> str:
    """Text that stays on its line, as HTML entities and backslashes keep it from being markup."""
    text = escape(printable(text), quote=False)
    return _MARKUP.sub(r"\\\1", text).replace("\n", "<br>")
