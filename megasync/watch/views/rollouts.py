"""Recorded responses: a table to search and filter, one response token by token, and its group side by side.

Filters, order and pages are applied here and not in the browser, which gets `PAGE` rows at a time, so the table is as
fast for 100,000 responses as for 100. Tokens are drawn in portions of `PORTION`, those of a folded turn when it is
unfolded. The texts of responses come from outside: each is the text of an element, never HTML.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from nicegui import background_tasks, ui

from megasync.observe.rollouts import FOLDER, NO_SAMPLE, IndexRow, Response
from megasync.trajectory import ANSWER, Turn, of_sample
from megasync.watch import responses, units
from megasync.watch.decoder import decoder_of
from megasync.watch.elements import Chip, Text, card, notice, swatch, text, trouble
from megasync.watch.recorded import DROPPED, TRAINED, Bounds, Filters, RolloutIndex
from megasync.watch.responses import SHADINGS, Decoder, Shading, about, one_line, tree, turns, visible, writer_of
from megasync.watch.run_folder import ACTIVE, RunFolder
from megasync.watch.view import Place, Update, address

# Rows of a page, and tokens and turns of a portion.
PAGE, PORTION, TURNS = 25, 1500, 200
# A text search ends after this many matches or seconds, and says so.
MATCHES, SEARCH_SECONDS = 500, 10.0
# Responses of a group that are shown side by side, and characters of each.
MEMBERS, MEMBER_CHARACTERS = 32, 700
# Lines of a sample are indented up to this depth; the looks of their chips.
DEPTH, KINDS = 8, {"final": "good", "compacted": "warn", "retry": "warn", "sub-agent": "live"}
# Folded texts show this many characters.
PREVIEW = 80
ANY = "any"
# Heading, field that it sorts by, whether it is a number, and width in em: widths that followed the content would move
# all columns with each update. The text has the rest of the width.
COLUMNS = (
    ("step", "step", True, 4),
    ("group", "uid", False, 6.5),
    ("sample", "sample", True, 5.5),
    ("set", "set", False, 5),
    ("reward", "reward", True, 5.5),
    ("advantage", "advantage", True, 6.5),
    ("tokens", "tokens", True, 5.5),
    ("staleness", "staleness", True, 6.5),
    ("gap", "gap", True, 5),
    ("ended by", "finish_reason", False, 6),
    ("trained", "dropped", False, 8),
)
# What has bounds, and how their fields are called.
RANGES = {"reward": "reward", "length": "tokens", "staleness": "staleness", "step": "step"}
# Tokens that are decoded for the column with the text.
PREVIEW_TOKENS = 60
# Colours of shades below 0, above 0, and of steps.
BELOW, ABOVE = "var(--orange)", "var(--blue)"
STEPS = ("transparent", "var(--gray)", "var(--sky)", "var(--green)", "var(--orange)", "var(--purple)", "var(--red)")
# Share of a full colour, so that text stays readable on it.
STRENGTH = 65


def build(run: RunFolder, place: Place) -> Update:
    """Draws the recorded responses of a run. The query may have the filters, as `_remember` writes them."""
    if not run.buffered:
        troubles = trouble(run)
        other = "A supervised run generates no responses: it trains on those of its data."
        text("p", "A service records no responses of its tenants." if run.served else other, "empty")
        return troubles
    return _Rollouts(run, place).update


class _Rollouts:
    """The view: what is filtered, the page that is shown, and the response that is open."""

    def __init__(self, run: RunFolder, place: Place) -> None:
        self._run = run
        self._place = place
        self._index: RolloutIndex = run.rollouts
        self._decoder: Decoder | None = None
        # Why tokens are shown by their ids, until the page has said so.
        self._problem = ""
        self._rows: list[IndexRow] = []
        self._revision = -1
        self._page = 0
        self._sort, self._descending = "time", True
        self._matches: list[IndexRow] | None = None
        self._open: IndexRow | None = None
        # The table row under the open response's one, and the rows of the page by the responses that they show.
        self._detail: ui.element | None = None
        self._lines: dict[int, ui.element] = {}
        self._drawn: list[IndexRow] = []
        # The cells with the beginnings of their texts.
        self._previews: dict[int, Text] = {}
        self._troubles = trouble(run)
        with card("Responses") as frame:
            self._note = text("div", "", "note")
            with ui.element("div") as self._filled:
                self._controls(place)
                self._table()
        self._frame = frame
        self.update()

    # Filters

    def _controls(self, place: Place) -> None:
        query = place.query
        with ui.element("div").classes("filters"):
            self._text = ui.input("text contains").props("dense outlined clearable")
            self._uid = ui.input("group, or 0:1*", value=query.get("uid", ""))
            self._uid.props("dense outlined clearable")
            self._kind = ui.select([ANY], value=ANY, label="trained or dropped").props("dense outlined")
            self._set = ui.select([ANY], value=ANY, label="set").props("dense outlined")
            self._bounds = {name: _range(label, query.get(name, "")) for name, label in RANGES.items()}
        for control, name in ((self._kind, "dropped"), (self._set, "set")):
            if wanted := query.get(name):
                control.set_options([ANY, wanted], value=wanted)
        self._text.on("keydown.enter", self._search)
        self._text.on("clear", self._search)
        for control in (self._uid, self._kind, self._set, *(each for pair in self._bounds.values() for each in pair)):
            control.on_value_change(self._changed)

    def _remember(self) -> None:
        """Puts the filters into the address, so that it can be opened or passed on."""
        query = {
            "uid": (self._uid.value or "").strip(),
            "dropped": "" if self._kind.value == ANY else self._kind.value,
            "set": "" if self._set.value == ANY else self._set.value,
        }
        for name, fields in self._bounds.items():
            least, most = ("" if field.value is None else f"{field.value:g}" for field in fields)
            query[name] = least if least == most else f"{least}..{most}"
        kept = {name: value for name, value in query.items() if value}
        ui.navigate.history.replace(address(self._place.view, self._place.runs, kept))

    def filters(self) -> Filters:
        def bounds(name: str) -> Bounds | None:
            least, most = (field.value for field in self._bounds[name])
            return None if least is None and most is None else (least, most)

        return Filters(
            reward=bounds("reward"),
            length=bounds("length"),
            staleness=bounds("staleness"),
            step=bounds("step"),
            set=None if self._set.value == ANY else self._set.value,
            dropped="" if self._kind.value == ANY else str(self._kind.value),
            uid=(self._uid.value or "").strip(),
        )

    async def _changed(self) -> None:
        self._page = 0
        self._remember()
        if self._matches is not None:
            await self._search()
        else:
            self._select()

    async def _search(self) -> None:
        """Looks for the text in the responses that pass the other filters, the newest first."""
        wanted, self._page = (self._text.value or "").strip(), 0
        if not wanted:
            self._matches = None
            self._select()
            return
        self._note.say("searching ...")
        rows = self._index.select(self.filters())
        decoder = await self._get_decoder()
        matches, looked = await asyncio.to_thread(_find, self._index, rows, wanted, decoder)
        self._matches = matches
        self._select()
        if looked < len(rows):
            self._note.say(
                f"{len(matches)} matches in the newest {looked} of {len(rows)} responses; narrow the filters."
            )
        else:
            self._note.say(f"{len(matches)} of {len(rows)} responses match.")

    async def _get_decoder(self, quiet: bool = False) -> Decoder:
        """The decoder of the model's tokens; unless `quiet`, the page says once if tokens are shown by their ids."""
        if self._decoder is None:
            self._decoder, self._problem = await asyncio.to_thread(decoder_of, self._run)
        if self._problem and not quiet:
            with self._frame:
                notice(self._problem)
            self._problem = ""
        return self._decoder

    # The table

    def _table(self) -> None:
        with ui.element("div").classes("scroll-x"), ui.element("table").classes("table responses"):
            with ui.element("colgroup"):
                for *_, width in COLUMNS:
                    ui.element("col").style(f"width: {width}em")
                ui.element("col")
            with ui.element("thead"), ui.element("tr"):
                self._headings = {
                    field: text("th", heading, "number sortable" if numeric else "sortable")
                    for heading, field, numeric, _ in COLUMNS
                }
                text("th", "text")
                for field, heading in self._headings.items():
                    heading.on("click", partial(self._sort_by, field)).props('tabindex="0"')
                    heading.on("keydown.enter", partial(self._sort_by, field))
            self._body = ui.element("tbody")
        with ui.element("div").classes("pager"):
            self._back = ui.button("newer", on_click=partial(self._turn, -1)).props("flat dense no-caps")
            self._where = text("span", "", "note")
            self._next = ui.button("older", on_click=partial(self._turn, 1)).props("flat dense no-caps")

    def _sort_by(self, field: str) -> None:
        self._descending = not self._descending if field == self._sort else True
        self._sort, self._page = field, 0
        self._select()

    def _turn(self, pages: int) -> None:
        self._page = max(0, self._page + pages)
        self._draw()

    def update(self) -> None:
        """Takes in what was recorded since. A search stays as it was found, and so do rows around an open response."""
        self._troubles()
        if self._revision == self._index.revision:
            return
        self._revision = self._index.revision
        reasons, sets = set(), set()
        for row in self._index.rows:
            reasons.add(row.dropped)
            sets.add(row.set)
        self._offer(self._kind, [TRAINED, DROPPED, *sorted(reasons - {""})])
        self._offer(self._set, sorted(sets - {""}))
        self._set.set_visibility(bool(sets - {""}))
        if self._matches is None:
            self._select(draw=self._detail is None)

    def _offer(self, control: Any, options: Sequence[str]) -> None:
        wanted = [ANY, *options]
        if control.options != wanted:
            control.set_options(wanted if control.value in wanted else [*wanted, control.value])

    def _select(self, draw: bool = True) -> None:
        if self._matches is None:
            self._rows = self._index.select(self.filters(), self._sort, self._descending)
            total = len(self._index)
            self._filled.set_visibility(bool(total))
            self._note.say(
                f"{len(self._rows):,} of {total:,} recorded responses" if total else _no_responses(self._run)
            )
        else:
            kept = {id(row) for row in self._matches}
            rows = self._index.select(None, self._sort, self._descending)
            self._rows = [row for row in rows if id(row) in kept]
        if draw:
            self._draw()

    def _draw(self) -> None:
        pages = max(1, -(-len(self._rows) // PAGE))
        self._page = min(self._page, pages - 1)
        shown = self._rows[self._page * PAGE : (self._page + 1) * PAGE]
        newest_first = self._sort == "time" and self._descending
        self._back.set_text("newer" if newest_first else "back")
        self._next.set_text("older" if newest_first else "on")
        self._where.say(f"page {self._page + 1} of {pages}")
        self._back.set_enabled(self._page > 0)
        self._next.set_enabled(self._page + 1 < pages)
        for (heading, field, *_), element in zip(COLUMNS, self._headings.values(), strict=True):
            element.say(heading + (" ▾" if self._descending else " ▴") * (field == self._sort))
        if [id(row) for row in shown] == [id(row) for row in self._drawn]:
            return
        self._drawn = shown
        self._body.clear()
        self._lines.clear()
        self._detail = None
        texts = {number: cell.text for number, cell in self._previews.items() if cell.text}
        self._previews = {}
        with self._body:
            for row in shown:
                with ui.element("tr").classes("open").props('tabindex="0"') as line:
                    for (_, field, numeric, _), cell in zip(COLUMNS, _cells(row), strict=True):
                        if field == "dropped":
                            with ui.element("td"):
                                Chip(*(("trained", "good") if not row.dropped else (row.dropped, "warn")))
                        else:
                            text("td", cell, "number" if numeric else "")
                    self._previews[id(row)] = text("td", texts.get(id(row), ""), "preview mono")
                self._lines[id(row)] = line
                line.on("click", partial(self._show, row))
                line.on("keydown.enter", partial(self._show, row))
        background_tasks.create(self._preview([row for row in shown if id(row) not in texts]))
        if self._open is not None and id(self._open) in self._lines:
            background_tasks.create(self._show(self._open, False))

    async def _preview(self, rows: Sequence[IndexRow]) -> None:
        """Fills in the beginnings of the responses' texts, which are read from their bodies."""
        decoder = await self._get_decoder(quiet=True)
        read = await asyncio.to_thread(lambda: [responses.read(self._index, row) for row in rows])
        for row, response in zip(rows, read, strict=True):
            cell = self._previews.get(id(row))
            if cell is not None and not cell.is_deleted and not isinstance(response, str):
                content = response.text or decoder.text(response.ids[:PREVIEW_TOKENS])
                cell.say(_printable(_beginning(one_line(content))))

    # One response

    async def _show(self, row: IndexRow, by_reader: bool = True) -> None:
        """Opens a response under its row, or after the table if that is on another page; a second click closes it."""
        if by_reader and row is self._open and self._detail is not None:
            self._open = None
            self._close()
            self._draw()
            return
        self._open = row
        decoder = await self._get_decoder()
        members = self._index.group(row.uid)
        read = await asyncio.to_thread(lambda: [responses.read(self._index, member) for member in members[:MEMBERS]])
        answer = await asyncio.to_thread(self._index.answer, row.uid)
        if self._open is not row:
            return
        self._close()
        line = self._lines.get(id(row))
        with self._body, ui.element("tr").classes("detail") as self._detail:
            if line is not None:
                self._detail.move(target_index=self._body.default_slot.children.index(line) + 1)
            with ui.element("td").props(f"colspan={len(COLUMNS) + 1}"):
                pile = ui.element("div").classes("pile")
        with pile:
            position = next((at for at, member in enumerate(members[:MEMBERS]) if member is row), None)
            response = (
                read[position] if position is not None else await asyncio.to_thread(responses.read, self._index, row)
            )
            _one(row, response, answer, decoder)
            if row.line is not None:
                _lines(row, [member for member in members if member.number == row.number], self._show)
            if len(members) > 1:
                _group(row, members, read, decoder, self._show)
        if by_reader:
            ui.run_javascript(f"getElement({self._detail.id}).$el?.scrollIntoView({{block: 'nearest'}})")

    def _close(self) -> None:
        if self._detail is not None:
            self._detail.delete()
            self._detail = None


def _no_responses(run: RunFolder) -> str:
    if run.settings.get("observe.rollouts") == 0:
        return "This run has recorded no responses: observe.rollouts is 0."
    if run.status in ACTIVE:
        return "No responses yet: they come with the first trained step, or with the first dropped group."
    return f"This run has recorded no responses: {FOLDER}/ is missing or empty."


def _range(label: str, value: str) -> tuple[ui.number, ui.number]:
    """Two fields that stay together. In an address, `3` is from 3 to 3, and `0.5..` has no upper bound."""
    least, dots, most = value.partition("..")
    with ui.element("div").classes("range"):
        return _bound(f"{label} from", least), _bound("to", most if dots else least)


def _bound(label: str, value: str) -> ui.number:
    try:
        start = float(value)
    except ValueError:
        start = math.nan
    return ui.number(label, value=start if math.isfinite(start) else None).props("dense outlined clearable")


def _find(index: RolloutIndex, rows: Sequence[IndexRow], wanted: str, decoder: Decoder) -> tuple[list[IndexRow], int]:
    """The rows whose text has `wanted`, and how many were looked at."""
    matches, looked, start = [], 0, time.monotonic()
    for row in rows:
        if len(matches) == MATCHES or time.monotonic() - start > SEARCH_SECONDS:
            break
        looked += 1
        if index.contains(row, wanted, lambda response: decoder.text(response.ids)):
            matches.append(row)
    return matches, looked


def _cells(row: IndexRow) -> list[str]:
    return [
        str(row.step) if row.step else "",
        row.uid,
        "" if row.sample == NO_SAMPLE else str(row.sample),
        row.set,
        units.fixed(row.reward),
        units.fixed(row.advantage),
        str(row.tokens),
        str(row.staleness),
        units.number(row.gap),
        row.finish_reason,
        row.dropped,
    ]


def _one(row: IndexRow, response: Response | str, answer: str | None, decoder: Decoder) -> None:
    """Draws a response with what is known of it, token by token; `answer` is the reference answer of its group."""
    what = f"group {row.uid}" + ("" if row.sample == NO_SAMPLE else f", response {row.sample}")
    with card(f"Response: {what}", units.day_and_clock(row.time)):
        _facts(row)
        if isinstance(response, str):
            notice(response, bad=True)
            return
        if response.problem:
            notice(response.problem, bad=True)
        if row.sample == NO_SAMPLE:
            return
        _folded(f"prompt, {len(response.prompt_ids)} tokens", lambda: decoder.text(response.prompt_ids))
        if answer is not None:
            _reference(answer)
        _Tokens(response, decoder)
        if response.text:
            _folded("the text that the reward function saw", lambda: response.text)


def _reference(answer: str) -> None:
    """Draws the reference answer: a short one on a line, another one as a line that unfolds."""
    line = one_line(answer)
    if len(line) > PREVIEW or "\n" in answer:
        _folded(f"reference answer: {_beginning(line)}", lambda: answer)
        return
    with ui.element("div").classes("legend facts"), ui.element("span").classes("item"):
        text("span", "reference answer")
        text("b", line).classes("mono")


def _facts(row: IndexRow) -> None:
    facts = {
        "reward": units.fixed(row.reward),
        "advantage": units.fixed(row.advantage),
        "tokens": f"{row.tokens} after {row.prompt_tokens} of the prompt",
        "staleness": f"{row.staleness} at version {row.version}",
        "gap": "" if row.gap is None else f"{units.number(row.gap)} nats",
        "ended by": row.finish_reason,
        "line": "" if row.line is None else one_line(row.line.kind),
        "dropped": row.dropped,
        "set": row.set,
    }
    # What the reward functions and the workflow said.
    facts |= {name: units.number(value) for name, value in sorted(row.metrics.items())}
    with ui.element("div").classes("legend facts"):
        for name, value in facts.items():
            if value:
                with ui.element("span").classes("item"):
                    text("span", name)
                    text("b", value)


def _folded(summary: str, content: Callable[[], str]) -> None:
    """A text that is made when it is unfolded."""
    _opening(summary, lambda: text("pre", _printable(content())))


def _opening(summary: str, draw: Callable[[], object], opened: bool = False) -> None:
    """A line under which something is drawn when it is first unfolded."""
    block = ui.element("details").classes("text-block")
    with block:
        text("summary", summary)
    drawn = False

    def unfold() -> None:
        nonlocal drawn
        if not drawn:
            drawn = True
            with block:
                draw()

    if opened:
        block.props("open")
        unfold()
    block.on("toggle", unfold, args=[])


def _beginning(content: str) -> str:
    return content if len(content) <= PREVIEW else f"{content[:PREVIEW]} ..."


def _printable(content: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in content)


class _Tokens:
    """The tokens of a response by its turns, coloured by one of `SHADINGS`.

    Turns are folded, except the last answer; without notes of turns, no answer is. The tokens of a turn are drawn when
    it is unfolded.
    """

    def __init__(self, response: Response, decoder: Decoder) -> None:
        self._response = response
        self._pieces = decoder.pieces(response.ids)
        self._versions = response.versions.expand()
        self._shadings = {name: made for name, make in SHADINGS.items() if (made := make(response)) is not None}
        self._elements: dict[int, Any] = {}
        self._turns = turns(response)
        self._last = next((turn for turn in reversed(self._turns) if turn.role == ANSWER), None)
        with ui.element("div").classes("row-name"):
            names = list(self._shadings)
            self._choice = ui.toggle(names, value=names[0], on_change=self._colour).props("dense no-caps unelevated")
        self._legend = ui.element("div").classes("legend")
        with ui.element("div").classes("tokens text mono"):
            _in_portions(len(self._turns), TURNS, "turns", lambda number: self._draw_turn(self._turns[number]))
        self._colour()

    def _draw_turn(self, turn: Turn) -> None:
        if turn.role == ANSWER and not self._response.turns:
            self._draw_tokens(turn)
            return
        words = one_line("".join(self._pieces[turn.start : min(turn.end, turn.start + 4 * PREVIEW)]))

        def draw() -> None:
            for call in turn.calls:
                _folded(_beginning(one_line(f"{call.name}({call.arguments})")), partial(str, call.arguments))
            with ui.element("pre"):
                self._draw_tokens(turn)

        _opening(f"{writer_of(turn)}, {turn.end - turn.start} tokens: {_beginning(words)}", draw, turn is self._last)

    def _draw_tokens(self, turn: Turn) -> None:
        _in_portions(turn.end - turn.start, PORTION, "tokens", lambda number: self._draw_token(turn.start + number))

    def _draw_token(self, at: int) -> None:
        element = self._elements[at] = text("span", visible(self._pieces[at]))
        element.props["title"] = about(self._response, at, self._versions)
        element.style(f"background: {colour(self._shadings[str(self._choice.value)], at)}")

    def _colour(self) -> None:
        shading = self._shadings[str(self._choice.value)]
        for at, element in self._elements.items():
            element.style(replace=f"background: {colour(shading, at)}")
        self._legend.clear()
        with self._legend:
            labels = [(shading.below, BELOW), (shading.above, ABOVE)]
            for label, shade in [*labels, *zip(shading.steps, map(_step, range(len(shading.steps))), strict=True)]:
                if label:
                    swatch(label, shade)


def _in_portions(count: int, portion: int, what: str, draw: Callable[[int], None]) -> None:
    """Draws parts 0 to `count`, as many at a time; a button draws the next ones in its place."""
    box = ui.element("span")

    def go_on(start: int) -> None:
        end = min(count, start + portion)
        with box:
            for number in range(start, end):
                draw(number)
            if end < count:
                more = ui.button(f"show more, {count - end:,} {what} are left").props("flat dense no-caps")
                more.on_click(lambda: (go_on(end), more.delete()))

    go_on(0)


def colour(shading: Shading, at: int) -> str:
    """The background of a token, as CSS."""
    shade = float(shading.shades[at])
    if np.isnan(shade):
        return "transparent"
    if shading.steps:
        return _step(int(shade))
    strength = round(min(1.0, abs(shade)) * STRENGTH)
    return (
        f"color-mix(in srgb, {BELOW if shade < 0 else ABOVE} {strength}%, transparent)" if strength else "transparent"
    )


def _step(number: int) -> str:
    """Colours of steps repeat, except the first, which is none."""
    of_list = STEPS[0] if not number else STEPS[1 + (number - 1) % (len(STEPS) - 1)]
    return of_list if of_list == "transparent" else f"color-mix(in srgb, {of_list} {STRENGTH}%, transparent)"


def _lines(row: IndexRow, members: Sequence[IndexRow], show: Callable[[IndexRow], Any]) -> None:
    """The lines of a sample as a tree, the open one marked, over the answers from the first to the last."""
    drawn = tree(members)
    count = max(1, *(line.last + 1 for _, _, line in drawn))
    note = f"{units.counted(len(drawn), 'line')}, {units.counted(count, 'answer')}"
    with card(f"Lines of sample {row.number} of group {row.uid}", note), ui.element("div").classes("tree"):
        for depth, member, line in drawn:
            with ui.element("div").classes("line" + " chosen" * (member is row)).props('tabindex="0"') as box:
                with ui.element("div").classes("origin").style(f"padding-left: {min(depth, DEPTH) * 1.4}em"):
                    text("span", "└" if depth else "", "note")
                    Chip(one_line(line.kind), KINDS.get(line.kind, ""))
                    text("span", one_line(line.origin), "note")
                with ui.element("div").classes("answers"):
                    start, width = (100 * part / count for part in (line.first, 1 + line.last - line.first))
                    ui.element("i").style(f"left: {start:.2f}%; width: {width:.2f}%")
                several = line.last > line.first
                answers = f"answers {line.first + 1} to {line.last + 1}" if several else f"answer {line.first + 1}"
                text("div", f"response {member.sample}, {answers}, {units.counted(member.tokens, 'token')}", "note")
            box.on("click", partial(show, member))
            box.on("keydown.enter", partial(show, member))


def _group(
    row: IndexRow,
    members: Sequence[IndexRow],
    read: Sequence[Response | str],
    decoder: Decoder,
    show: Callable[[IndexRow], Any],
) -> None:
    """All recorded responses to the same prompt, the open one marked."""
    samples: dict[tuple[int, int], list[float]] = {}
    for place, member in enumerate(members):
        if member.reward is not None:
            samples.setdefault((member.number, place if member.number < 0 else 0), []).append(member.reward)
    rewards = [of_sample(each) for each in samples.values()]
    mean = f"{len(members)} responses, mean reward {units.fixed(sum(rewards) / len(rewards))}" if rewards else ""
    with card(f"Group {row.uid} side by side", mean), ui.element("div").classes("members"):
        for member, response in zip(members, read, strict=False):
            with ui.element("article").classes("member" + " chosen" * (member is row)) as box:
                with ui.element("div").classes("legend"):
                    for name, value in (
                        ("response", str(member.sample)),
                        ("reward", units.fixed(member.reward)),
                        ("advantage", units.fixed(member.advantage)),
                        ("tokens", str(member.tokens)),
                    ):
                        with ui.element("span").classes("item"):
                            text("span", name)
                            text("b", value)
                if isinstance(response, str):
                    text("div", response, "note")
                    continue
                content = response.text or decoder.text(response.ids)
                cut = content if len(content) <= MEMBER_CHARACTERS else f"{content[:MEMBER_CHARACTERS]} ..."
                text("div", _printable(cut), "text mono")
            box.on("click", partial(show, member))
    if len(members) > MEMBERS:
        text("div", f"{len(members) - MEMBERS} more are in the table above.", "note")
