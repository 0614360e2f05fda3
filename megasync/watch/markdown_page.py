"""A document as GitHub's Markdown, with its figures as PNG files in a folder beside it.

Every text is escaped, so that nothing which a run recorded becomes markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

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

_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|~$])")


def render_markdown(document: Document, folder: str) -> tuple[str, dict[str, bytes]]:
    """The text, and the pictures by their file names; the text expects these in `folder` beside it."""
    pictures: dict[str, bytes] = {}
    return "\n\n".join(_parts(document, folder, pictures)) + "\n", pictures


def _parts(document: Document, folder: str, pictures: dict[str, bytes]) -> Iterator[str]:
    yield f"# {_text(document.title)}"
    yield " · ".join(_text(part) for part in (document.status, document.subtitle) if part)
    yield _text(document.abstract)
    if document.notes:
        yield "**What is missing.**\n\n" + "\n".join(f"- {_text(note)}" for note in document.notes)
    if document.readings.rows:
        yield _rows(("", "", ""), document.readings.rows, (False, True, False))
    for number, section in enumerate(document.shown, 1):
        yield f"## {number} {_text(section.title)}"
        for block in section.blocks:
            yield _block(block, folder, pictures)


def _block(block: Block, folder: str, pictures: dict[str, bytes]) -> str:
    match block:
        case Text(text):
            return _text(text)
        case Commands(text):
            # The fence is longer than any within.
            longest = max((len(run) for run in re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            return f"{fence}bash\n{printable(text)}\n{fence}"
        case Facts(rows):
            return _rows(("", ""), rows, (False, False))
        case Chart(caption, figure, wide):
            name = f"figure-{len(pictures) + 1}.png"
            pictures[name] = picture(figure, "png", wide)
            return f"![{_text(caption)}]({Path(folder, name).as_posix().replace(' ', '%20')})\n\n*{_text(caption)}*"
        case Table(caption, headings, rows, folded):
            numeric = [any(isinstance(row[at], Number) for row in rows) for at in range(len(headings))]
            table = _rows(headings, rows, numeric)
            if folded:
                return f"<details><summary>{_text(caption)}</summary>\n\n{table}\n\n</details>"
            return f"**{_text(caption)}**\n\n{table}"


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
