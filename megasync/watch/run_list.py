"""The page of a folder: its runs, newest first, with what tells them apart, and which of them to open side by side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import ui

from megasync.models.hub import title
from megasync.observe import names
from megasync.observe.metrics import METRICS_FILE
from megasync.watch import elements, units
from megasync.watch.run_folder import ACTIVE, RunFolder, is_run
from megasync.watch.view import address

log = logging.getLogger(__name__)


# Heading, what a run is sorted by under it, whether it is a number, and whether a narrow window shows it.
COLUMNS: tuple[tuple[str, Callable[[RunRow], Any], bool, bool], ...] = (
    ("run", lambda row: row.name, False, True),
    ("status", lambda row: row.summary.status, False, True),
    ("model", lambda row: row.summary.model, False, False),
    ("step", lambda row: row.summary.step, True, True),
    ("held-out", lambda row: row.summary.held_out, True, True),
    ("reward or loss", lambda row: row.summary.training, True, False),
    ("duration", lambda row: row.summary.seconds, True, False),
    ("started", lambda row: row.started, True, False),
    ("newest line", lambda row: row.summary.newest, True, False),
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The columns of one run in the list. `newest` is the time of its newest measurement, in epoch seconds.

    `held_out` is the score, of a supervised run the validation loss; `training` is the reward, or the loss.
    """

    status: str = "reading"
    step: int = 0
    total_steps: int | None = None
    model: str = ""
    held_out: float | None = None
    training: float | None = None
    seconds: float | None = None
    newest: float | None = None


def summarize(run: RunFolder) -> Summary:
    times, latest = run.metrics.times, run.metrics.latest
    held_out, training = (names.VALIDATION_LOSS, names.TRAINING_LOSS) if run.supervised else (names.SCORE, names.REWARD)
    return Summary(
        run.status,
        run.step,
        run.total_steps,
        title(str(run.settings.get("model.path") or "")),
        latest(held_out),
        latest(training),
        run.seconds,
        float(times.max()) if len(times) else None,
    )


class RunRow:
    """One run of the list. The folder of a run that has ended is let go once it is summarized."""

    def __init__(self, name: str, path: Path, first_view: str, on_choice: Callable[[], None]) -> None:
        self.name = name
        self.started = _started(path)
        self.summary = Summary()
        self.chosen = False
        self._path = path
        self._folder: RunFolder | None = None
        self._seen: object = None
        with ui.element("tr").classes("open") as self.element:
            with ui.element("td"):
                box = ui.element("input").props("type=checkbox")
                # Not through the text of `props`, which a name could end.
                box.props["aria-label"] = f"Choose {name}"
                box.on("change", self._choose, args=["target.checked"], js_handler="(e) => emit(e.target.checked)")
            with ui.element("td").classes("run-link"):
                elements.text("a", name).props["href"] = address(first_view, [name])
            with ui.element("td"):
                self._status = elements.Chip("reading", "")
            self._cells = [elements.text("td", "", _classes(*column)) for column in COLUMNS[2:]]
        self._on_choice = on_choice

    def _choose(self, event: object) -> None:
        self.chosen = bool(getattr(event, "args", False))
        self._on_choice()

    async def refresh(self) -> None:
        seen = _stamp(self._path)
        if self._folder is None and seen == self._seen:
            return
        self._seen = seen
        folder = self._folder
        if folder is None:
            folder = await asyncio.to_thread(RunFolder, self._path)
        else:
            folder.refresh()
        self._show(summarize(folder))
        self._folder = folder if folder.status in ACTIVE else None

    def unreadable(self) -> None:
        self._status.show("unreadable", "bad")

    def _show(self, summary: Summary) -> None:
        self.summary = summary
        self._status.show(summary.status, elements.STATUS_LOOKS[summary.status])
        total = f" / {summary.total_steps}" if summary.total_steps is not None else ""
        texts = (
            summary.model,
            f"{summary.step}{total}",
            units.fixed(summary.held_out),
            units.fixed(summary.training),
            units.duration(summary.seconds),
            units.age(self.started or None),
            units.age(summary.newest),
        )
        for cell, shown in zip(self._cells, texts, strict=True):
            cell.say(shown)


class RunList:
    """Draws the list into the current container: newest runs first, until another column is chosen."""

    def __init__(self, target: Path, paths: Callable[[], Mapping[str, Path]], first_view: str) -> None:
        self._paths = paths
        self._first_view = first_view
        self._rows: dict[str, RunRow] = {}
        self._sort, self._descending = "started", True
        self._order: list[str] = []
        with ui.element("header").classes("bar"), ui.element("div").classes("bar-top"):
            elements.text("span", "megasync", "brand")
            elements.text("span", "/", "crumb")
            elements.text("span", str(target), "run-name")
        ui.page_title(f"{target} · megasync")
        with ui.element("div").classes("page"), ui.element("section").classes("card"):
            with ui.element("div").classes("title"):
                elements.text("span", "Runs")
                elements.text("span", "choose several to see them side by side", "note")
                self._open = elements.text("a", "", "right")
            with ui.element("div").classes("filters"):
                self._wanted = ui.input("name, model or status").props("dense outlined clearable")
                self._wanted.on_value_change(self._arrange)
            with ui.element("div").classes("scroll-x"), ui.element("table").classes("table runs"):
                with ui.element("thead"), ui.element("tr"):
                    elements.text("th", "")
                    self._headings = {
                        column[0]: elements.text("th", column[0], f"sortable {_classes(*column)}").props('tabindex="0"')
                        for column in COLUMNS
                    }
                    for name, heading in self._headings.items():
                        heading.on("click", partial(self._sort_by, name))
                        heading.on("keydown.enter", partial(self._sort_by, name))
                self._body = ui.element("tbody")
        self._draw()

    def _draw(self) -> None:
        """Rows of runs that are new, without those that are gone, in the chosen order."""
        paths = self._paths()
        for name in [name for name in self._rows if name not in paths]:
            self._rows.pop(name).element.delete()
            self._order.remove(name)
        for name in sorted(paths.keys() - self._rows):
            with self._body:
                self._rows[name] = RunRow(name, paths[name], self._first_view, self._offer)
            self._order.append(name)
        self._arrange()

    def _sort_by(self, heading: str) -> None:
        self._descending = not self._descending if heading == self._sort else heading not in ("run", "status", "model")
        self._sort = heading
        self._arrange()

    def _arrange(self) -> None:
        """Shows the rows that are looked for, in the chosen order; rows without a value come last."""
        for heading, element in self._headings.items():
            element.say(heading + (" ▾" if self._descending else " ▴") * (heading == self._sort))
        value = next(column[1] for column in COLUMNS if column[0] == self._sort)
        with_value = [row for row in self._rows.values() if value(row) is not None]
        ordered = sorted(with_value, key=lambda row: (value(row), row.name), reverse=self._descending)
        order = [row.name for row in (*ordered, *(row for row in self._rows.values() if value(row) is None))]
        if order != self._order:
            self._order = order
            for place, name in enumerate(order):
                self._rows[name].element.move(target_index=place)
        wanted = (self._wanted.value or "").casefold()
        for row in self._rows.values():
            matches = any(wanted in text.casefold() for text in (row.name, row.summary.model, row.summary.status))
            if row.element.visible != matches:
                row.element.set_visibility(matches)

    def _offer(self) -> None:
        oldest_first = sorted(self._rows.values(), key=lambda row: (row.started, row.name))
        chosen = [row.name for row in oldest_first if row.chosen]
        self._open.say(f"Open {len(chosen)} side by side" if len(chosen) > 1 else "")
        if chosen:
            self._open.props["href"] = address(self._first_view, chosen)

    async def refresh(self) -> None:
        self._draw()
        for row in [self._rows[name] for name in self._order]:
            try:
                await row.refresh()
            except OSError:
                pass  # the folder was deleted meanwhile
            except Exception:  # one run must not hide the others
                log.exception("reading %s failed", row.name)
                row.unreadable()
        self._arrange()


def _classes(heading: str, value: object, is_number: bool, narrow: bool) -> str:
    return f"{'number' if is_number else ''} {'' if narrow else 'hide-narrow'}"


def _started(path: Path) -> float:
    """When the run's configuration was written; the folder's own time if it has none."""
    for candidate in (path / "config.yaml", path):
        with contextlib.suppress(OSError):
            return candidate.stat().st_mtime
    return 0.0


def _stamp(path: Path) -> object:
    """Changes when the run writes a measurement or its lock is taken anew; None if it is no run any more."""
    if not is_run(path):
        return None
    marks = []
    for name in (METRICS_FILE, "driver.lock", "config.yaml"):
        with contextlib.suppress(OSError):
            status = (path / name).stat()
            marks.append((name, status.st_size, status.st_mtime_ns))
    return tuple(marks)
