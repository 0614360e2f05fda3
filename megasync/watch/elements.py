"""Small pieces that several views show alike: text, chips, large numbers, stacked bars, tables, notices.

Text is always text, never HTML, so nothing that a run recorded can act in the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from megasync.watch import units
from megasync.watch.run_folder import ACTIVE, CRASHED, FAILED, FINISHED, RUNNING, STARTING, STOPPED, RunFolder

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The look of each status of a run.
STATUS_LOOKS = {
    STARTING: "live", RUNNING: "live", FINISHED: "good", STOPPED: "", FAILED: "bad", CRASHED: "bad",
}  # fmt: skip


class Text(TextElement):
    """Any element with text in it. `say` changes the text if it differs."""

    def __init__(self, tag: str, content: str) -> None:
        super().__init__(tag=tag, text=content)

    def say(self, content: str) -> None:
        if self.text != content:
            self.text = content


def text(tag: str, content: str, classes: str = "") -> Text:
    return Text(tag, content).classes(classes)


def notice(content: str, bad: bool = False, calm: bool = False) -> None:
    """Something that the reader should know first: a problem unless it is `calm`, a failure if it is `bad`.

    Of several lines the first is shown, and the others unfold.
    """
    with ui.element("div").classes(f"notice {'bad' if bad else 'calm' if calm else ''}").props('role="status"'):
        folded(content) if "\n" in plain(content) else text("span", plain(content))


def trouble(run: RunFolder) -> Callable[[], None]:
    """Why the run ended badly or seems to hang, and what of it could not be read. Returns what updates it."""
    box = ui.element("div")
    shown: list[tuple[str, str]] = []

    def update() -> None:
        problems = []
        if run.status == CRASHED:
            problems.append(
                ("The driver of this run is gone and left no reason: it was killed, or its machine failed.", "bad")
            )
        if run.reason:
            problems.append((f"Run {run.status}: {run.reason}", "bad" if run.status == FAILED else "calm"))
        if run.silent_seconds is not None:
            silent = units.duration(run.silent_seconds)
            problems.append(
                (f"The driver lives, but has written nothing for {silent}: it hangs, or its disk does.", "bad")
            )
        problems += [(sentence, "") for sentence in run.missing]
        if problems != shown:
            shown[:] = problems
            box.clear()
            with box:
                for sentence, look in problems:
                    notice(sentence, bad=look == "bad", calm=look == "calm")

    update()
    return update


def why_none(run: RunFolder, what: str) -> str:
    """Why there is nothing of `what`, a plural, to show: it comes, or this run does not have it."""
    if run.step:
        return f"This run has measured no {what}."
    if run.status in ACTIVE:
        return f"No {what} yet: they come with the first trained step."
    return f"No {what}: this run ended before its first step."


class Chip(Text):
    """A state: a shape, a colour and a word. Looks: good, warn, bad, live, or none."""

    def __init__(self, word: str, look: str) -> None:
        super().__init__("span", word)
        self.classes(f"chip {look}")

    def show(self, word: str, look: str) -> None:
        self.say(word)
        self.classes(replace=f"chip {look}")


def status_line(run: RunFolder) -> Callable[[], None]:
    """The run's status as a chip, and how old its newest line is. Returns what updates it."""
    chip = Chip("", "")
    line = text("span", "", "right")

    def update() -> None:
        chip.show(run.status, STATUS_LOOKS[run.status])
        if run.end is None:
            line.say("")
        elif run.status in ACTIVE:
            line.say(f"running for {units.duration(run.seconds)}")
        else:
            line.say(f"ended {units.day_and_clock(run.end)} after {units.duration(run.seconds)}")

    update()
    return update


@contextmanager
def card(title: str, note: str = "", width: str = "") -> Iterator[ui.element]:
    """A framed part with a title. Widths in a grid: third, half, two-thirds, or all of it."""
    with ui.element("section").classes(f"card {width}") as element:
        with ui.element("div").classes("title"):
            text("span", title)
            if note:
                text("span", note, "note")
        yield element


class Reading:
    """A large number with a name above and a line below."""

    def __init__(self, name: str) -> None:
        with ui.element("div").classes("reading"):
            self._name = text("div", name, "name")
            with ui.element("div").classes("value"):
                self._value = text("span", units.NOTHING)
                self._unit = text("span", "", "unit")
            self._below = text("div", "", "below")

    def show(self, value: str, unit: str = "", below: str = "", name: str | None = None) -> None:
        if name is not None:
            self._name.say(name)
        self._value.say(value)
        self._unit.say(unit)
        self._below.say(below)


def swatch(label: str, colour: str) -> ui.element:
    """An entry of a legend; what is drawn in it stands behind the label."""
    with ui.element("span").classes("item") as item:
        ui.element("span").classes("swatch").style(f"background: {colour}")
        text("span", label)
    return item


class Shares:
    """A bar of parts of a whole, and a legend with each part's amount."""

    def __init__(self, describe: Callable[[float], str]) -> None:
        self._describe = describe
        self._shown: object = None
        self._element = ui.element("div")

    def show(self, parts: Mapping[str, tuple[float, str]], total: float) -> None:
        """`parts` are (amount, colour) by label; what is left of `whole` stays empty."""
        if self._shown == (parts, total):
            return
        self._shown = (dict(parts), total)
        self._element.clear()
        with self._element:
            with ui.element("div").classes("stack").props('aria-hidden="true"'):
                for amount, colour in parts.values():
                    if amount > 0 and total > 0:
                        ui.element("div").style(f"width: {100 * amount / total:.2f}%; background: {colour}")
            with ui.element("div").classes("legend"):
                for label, (amount, colour) in parts.items():
                    with swatch(label, colour):
                        text("b", self._describe(amount))


def plain(content: str) -> str:
    """Without the colour codes of terminals, which logs and errors of other programs contain."""
    return ESCAPES.sub("", content).strip()


def first_line(content: str) -> str:
    """The first line of a text, which says what it is about, without the end of a log that it announces."""
    return plain(content).partition("\n")[0].removesuffix(" Last lines of its log:")


def folded(content: str) -> None:
    """A long text of which only the first line is shown until it is opened."""
    with ui.element("details").classes("text-block"):
        text("summary", first_line(content))
        text("pre", plain(content))


# A cell is text, or a chip as (word, look). Of text of several lines the first one is shown, the others unfold.
Cell = str | tuple[str, str]


class Table:
    """Rows under headings, drawn again only if they differ; nothing while there are none.

    Columns named in `numbers` are right-aligned. Only the column `wide` breaks its lines.
    """

    def __init__(self, headings: Sequence[str], numbers: Sequence[str] = (), wide: str = "") -> None:
        self._classes = [
            "number" if heading in numbers else "wide" if heading == wide else "short" for heading in headings
        ]
        self._shown: list[Sequence[Cell]] | None = None
        self._table = ui.element("div").classes("scroll-x")
        self._table.set_visibility(False)
        with self._table, ui.element("table").classes("table"):
            with ui.element("thead"), ui.element("tr"):
                for heading, classes in zip(headings, self._classes, strict=True):
                    text("th", heading, classes)
            self._body = ui.element("tbody")

    def show(self, rows: Sequence[Sequence[Cell]]) -> None:
        if self._shown == list(rows):
            return
        self._shown = list(rows)
        self._table.set_visibility(bool(rows))
        self._body.clear()
        with self._body:
            for row in rows:
                with ui.element("tr"):
                    for cell, classes in zip(row, self._classes, strict=True):
                        with ui.element("td").classes(classes):
                            if not isinstance(cell, str):
                                Chip(*cell)
                            elif "\n" in cell.strip():
                                folded(cell)
                            else:
                                text("span", plain(cell))
