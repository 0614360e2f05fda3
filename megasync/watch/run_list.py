"""The page of a folder: its runs, newest first, with what tells them apart, and which of them to open side by side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nicegui import ui

from megasync.observe import names
from megasync.observe.metrics import METRICS_FILE
from megasync.watch import elements, units
from megasync.watch.run_folder import ACTIVE, RunFolder, is_run
from megasync.watch.view import address

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Summary:
    """What the list says of a run. `newest` is the time of its newest measurement, in epoch seconds."""

    status: str
    step: int
    total_steps: int | None
    score: float | None
    reward: float | None
    newest: float | None


def summarize(run: RunFolder) -> Summary:
    times = run.metrics.times
    return Summary(
        run.status,
        run.step,
        run.total_steps,
        run.metrics.latest(names.SCORE),
        run.metrics.latest(names.REWARD),
        float(times.max()) if len(times) else None,
    )


class Row:
    """One run of the list. The folder of a run that has ended is let go once it is summarized."""

    def __init__(self, name: str, path: Path, first_view: str, on_choice: Callable[[], None]) -> None:
        self.name = name
        self._path = path
        self._folder: RunFolder | None = None
        self._seen: object = None
        with ui.element("tr").classes("open") as self.element:
            with ui.element("td"):
                self.box = ui.element("input").props("type=checkbox")
                # Not through the text of `props`, which a name could end.
                self.box.props["aria-label"] = f"Choose {name}"
                self.chosen = False
                self.box.on("change", self._choose, args=["target.checked"], js_handler="(e) => emit(e.target.checked)")
            with ui.element("td"):
                elements.text("a", name).props["href"] = address(first_view, [name])
            with ui.element("td"):
                self._status = elements.Chip("reading", "")
            self._step, self._score, self._reward = (elements.text("td", "", "number") for _ in range(3))
            self._age = elements.text("td", "", "number")
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
        self._status.show(summary.status, elements.STATUS_LOOKS[summary.status])
        total = f" / {summary.total_steps}" if summary.total_steps is not None else ""
        self._step.say(f"{summary.step}{total}")
        self._score.say(units.fixed(summary.score))
        self._reward.say(units.fixed(summary.reward))
        self._age.say(units.age(summary.newest))


class RunList:
    """Draws the list into the current container."""

    def __init__(self, target: Path, paths: Callable[[], Mapping[str, Path]], first_view: str) -> None:
        self._paths = paths
        self._first_view = first_view
        self._rows: dict[str, Row] = {}
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
            with ui.element("div").classes("scroll-x"), ui.element("table").classes("table runs"):
                with ui.element("thead"), ui.element("tr"):
                    for heading in ("", "run", "status"):
                        elements.text("th", heading)
                    for heading in ("step", "held-out score", "reward", "newest line"):
                        elements.text("th", heading, "number")
                self._body = ui.element("tbody")
        self._draw()

    def _draw(self) -> None:
        """Rows of runs that are new, at the top; without those that are gone."""
        paths = self._paths()
        for name in [name for name in self._rows if name not in paths]:
            self._rows.pop(name).element.delete()
        for name in sorted(paths.keys() - self._rows, key=lambda name: _started(paths[name])):
            with self._body:
                row = self._rows[name] = Row(name, paths[name], self._first_view, self._offer)
            row.element.move(target_index=0)

    def _offer(self) -> None:
        chosen = [name for name, row in self._rows.items() if row.chosen]
        self._open.say(f"Open {len(chosen)} side by side" if len(chosen) > 1 else "")
        if chosen:
            self._open.props["href"] = address(self._first_view, chosen)

    async def refresh(self) -> None:
        self._draw()
        for row in reversed(list(self._rows.values())):
            try:
                await row.refresh()
            except OSError:
                pass  # the folder was deleted meanwhile
            except Exception:  # one run must not hide the others
                log.exception("reading %s failed", row.name)
                row.unreadable()


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
    found = []
    for name in (METRICS_FILE, "driver.lock", "config.yaml"):
        with contextlib.suppress(OSError):
            status = (path / name).stat()
            found.append((name, status.st_size, status.st_mtime_ns))
    return tuple(found)
