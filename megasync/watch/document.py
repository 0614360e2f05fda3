"""What a report or a comparison says, apart from how it looks: titled sections of text, tables and figures.

Every text is plain text, whatever its source; `html_page` and `markdown_page` escape it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plotly.graph_objects import Figure

from megasync.watch import units


@dataclass(frozen=True, slots=True)
class Number:
    """A measured value, with the text that shows it."""

    value: float
    text: str


# Control characters, among them those that make a line read in another order than it is written.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

# None is an empty cell.
Cell = str | Number | None


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Commands:
    """Lines for a shell."""

    text: str


@dataclass(frozen=True, slots=True)
class Readings:
    """The numbers to see first: (name, value, what to compare it with)."""

    rows: Sequence[tuple[str, Cell, str]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with their values."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of numbers are right-aligned. A `folded` one is closed until the reader opens it.

    `texts` names columns whose cells are what somebody wrote: shown as they are, line breaks included.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its caption. Two neighbours that are not `wide` stand side by side."""

    caption: str
    figure: Figure
    wide: bool = False


Block = Text | Commands | Facts | Table | Chart


@dataclass(slots=True)
class Section:
    """Blocks under a title. One without blocks is left out."""

    title: str
    blocks: list[Block] = field(default_factory=list[Block])

    def add(self, *blocks: Block | None) -> None:
        """None is left out, and so is a table without rows."""
        self.blocks += [
            block
            for block in blocks
            if block is not None and not (isinstance(block, (Table, Facts)) and not block.rows)
        ]


@dataclass(frozen=True, slots=True)
class Document:
    """`status` is one word about the whole, `readings` its most important numbers; `notes` say what is missing."""

    title: str
    subtitle: str
    status: str
    abstract: str
    sections: Sequence[Section]
    readings: Readings = Readings(())
    notes: Sequence[str] = ()

    @property
    def shown(self) -> Iterator[Section]:
        return (section for section in self.sections if section.blocks)


def printable(text: str) -> str:
    """The text with a mark in place of every control character but tabs and line breaks."""
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n"))


def number(value: float | None, digits: int = 3) -> Cell:
    """Three significant digits, thousands as k."""
    return None if value is None else Number(value, units.number(value, digits))


def fixed(value: float | None, places: int = 3) -> Cell:
    return None if value is None else Number(value, units.fixed(value, places))


def seconds(value: float | None) -> Cell:
    return None if value is None else Number(value, units.duration(value))


def share(value: float | None) -> Cell:
    return None if value is None else Number(value, units.share(value))


def size(value: float | None, per: str = "") -> Cell:
    """Bytes, or bytes per second with `per="/s"`."""
    return None if value is None else Number(value, f"{units.size(value)}{per}")
