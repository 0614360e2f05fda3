"""What a report or a comparison says, apart from how it looks: titled sections of text, tables and figures.

Every text is plain text, whatever its source; `html_page` and `markdown_page` escape it. `Writer` has what both have in
common: the order of a document, and which method writes which type of block.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plotly.graph_objects import Figure

from megasync.watch import units
from megasync.watch.responses import Shading


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
class Verbatim:
    """Lines that are shown as they are; in Markdown with the colours of a `language`."""

    text: str
    language: str = ""


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


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a response, shown once for each way to colour them; Markdown has only their text.

    `pieces` are their texts, `about` what else is known of each, and `generated` whether the policy generated it.
    """

    caption: str
    pieces: Sequence[str]
    about: Sequence[str]
    generated: Sequence[bool]
    shadings: Mapping[str, Shading]


Block = Text | Verbatim | Facts | Table | Chart | Tokens


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


class Writer(ABC):
    """Writes a document part by part."""

    def parts(self, document: Document) -> Iterator[str]:
        yield self.head(document)
        if document.notes:
            yield self.notes(document.notes)
        if document.readings.rows:
            yield self.readings(document.readings.rows)
        for number, section in enumerate(document.shown, 1):
            yield from self.section(number, section)

    def block(self, block: Block) -> str:
        writes: dict[type, Callable[[Any], str]] = {
            Text: self.text,
            Verbatim: self.verbatim,
            Facts: self.facts,
            Table: self.table,
            Chart: self.chart,
            Tokens: self.tokens,
        }
        return writes[type(block)](block)

    @abstractmethod
    def head(self, document: Document) -> str:
        """Title, status, subtitle and abstract."""

    @abstractmethod
    def notes(self, notes: Sequence[str]) -> str: ...

    @abstractmethod
    def readings(self, rows: Sequence[tuple[str, Cell, str]]) -> str: ...

    @abstractmethod
    def section(self, number: int, section: Section) -> Iterator[str]:
        """A heading, and each block by `block`."""

    @abstractmethod
    def text(self, block: Text) -> str: ...

    @abstractmethod
    def verbatim(self, block: Verbatim) -> str: ...

    @abstractmethod
    def facts(self, block: Facts) -> str: ...

    @abstractmethod
    def table(self, block: Table) -> str: ...

    @abstractmethod
    def chart(self, block: Chart) -> str: ...

    @abstractmethod
    def tokens(self, block: Tokens) -> str: ...


def chart(figure: Figure | None, caption: str, wide: bool = False) -> Chart | None:
    """A figure of `figures` under its caption and its own note; None if there is nothing to draw."""
    if figure is None:
        return None
    note = figure.layout.meta["note"]
    return Chart(f"{caption} {note[0].upper()}{note[1:]}." if note else caption, figure, wide)


def charts(runs: Any, *draws: Callable[..., Figure | None], wide: bool = False) -> list[Chart | None]:
    """Functions of `figures` for a run or several; what a figure shows is its function's docstring."""
    return [chart(draw(runs), draw.__doc__ or "", wide) for draw in draws]


def shortened(text: str, most: int) -> str:
    """Beginning and end of a text of more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


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
