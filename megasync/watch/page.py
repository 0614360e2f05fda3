"""The live page of a run, or of a folder of runs: which views there are, what is open, and when it is drawn again.

    /                     the list of runs; of a single run, its first view
    /VIEW?run=A&run=B     a view, one column a run

Each run is read by one `RunFolder`, shared by all browsers. A browser's timer asks it to read on; only if it has read
something are the open views updated. Views are a table: one that is not in it does not exist on the page.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request
from nicegui import ui
from starlette.responses import RedirectResponse, Response

from megasync.errors import ConfigError
from megasync.watch import elements
from megasync.watch.run_folder import ACTIVE, RunFolder, find_runs, is_run
from megasync.watch.run_list import RunList
from megasync.watch.view import Place, Update, address
from megasync.watch.views import compare, faults, overview, rollouts, timeline, weights

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two looks at a run's files.
REFRESH_SECONDS = 2.0
# Browsers ask on their own; one look serves all that ask within this time.
FRESH_SECONDS = 1.0
# Opening a run of many steps reads its files once.
BUILD_SECONDS = 60.0
# With a modifier the browser opens the address itself, in a new tab or window.
TURN = "(e) => { if (!e.ctrlKey && !e.metaKey && !e.shiftKey) { e.preventDefault(); emit() } }"
STYLE, SCRIPT = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="4" fill="#0067a3"/>'
    '<path d="M3 11.5 6 7l3 2.5 4-5.5" fill="none" stroke="#fff" stroke-width="1.8" stroke-linecap="round" '
    'stroke-linejoin="round"/></svg>'
)


@dataclass(frozen=True)
class View:
    """`build` draws one run; with `across`, it draws all open runs together."""

    title: str
    build: Callable[..., Update | None]
    across: bool = False


# In the order of the number keys.
VIEWS: Mapping[str, View] = {
    "overview": View("Overview", overview.build),
    "timeline": View("Timeline", timeline.build),
    "rollouts": View("Rollouts", rollouts.build),
    "weights": View("Weights", weights.build),
    "faults": View("Faults", faults.build),
    "compare": View("Compare", compare.build, across=True),
}
FIRST = next(iter(VIEWS))


@dataclass
class OpenRun:
    """A run that somebody looks at. `revision` grows whenever its folder has read something new."""

    path: Path
    folder: RunFolder | None = None
    revision: int = 0
    _looked: float = 0.0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refresh(self) -> RunFolder:
        """Reads what the run has written since. The first reading may be long, and is done in a thread."""
        async with self._lock:
            if self.folder is None:
                self.folder = await asyncio.to_thread(RunFolder, self.path)
                self._looked = time.monotonic()
            elif time.monotonic() - self._looked >= FRESH_SECONDS:
                # Short, and in the event loop, where no view reads the folder meanwhile.
                changed = self.folder.refresh()
                # Of a live run, ages and durations go on.
                self.revision += changed or self.folder.status in ACTIVE
                self._looked = time.monotonic()
            # Views then find it counted, and do not copy the ledger in the event loop.
            await asyncio.to_thread(self.folder.counted)
            return self.folder


class OpenRuns:
    """The runs under `target` by their names in addresses, and those that were opened so far."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.single = target.is_dir() and is_run(target)
        if not find_runs(target):
            raise ConfigError(f"{target} is neither a run directory nor a folder with run directories in it")
        self._open: dict[str, OpenRun] = {}

    def paths(self) -> dict[str, Path]:
        return {path.resolve().name: path for path in find_runs(self.target)}

    def open(self, name: str) -> OpenRun | None:
        """None if there is no such run. The name is looked up, so no address leads outside of `target`."""
        if name not in self._open:
            path = self.paths().get(name)
            if path is None:
                return None
            self._open[name] = OpenRun(path)
        return self._open[name]


@dataclass
class Shown:
    """A view that a browser shows of some runs, and the revisions of them that it has drawn."""

    runs: Sequence[OpenRun]
    update: Update | None
    drawn: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.drawn = self.drawn or [run.revision for run in self.runs]

    def catch_up(self) -> None:
        newest = [run.revision for run in self.runs]
        if newest != self.drawn and self.update is not None:
            _attempt(self.update)
        self.drawn = newest


class Screen:
    """The view of one browser: the bar, and below it one view of its runs."""

    def __init__(self, source: OpenRuns, runs: dict[str, OpenRun], unknown: Sequence[str]) -> None:
        self._source = source
        self._runs = runs
        self._unknown = unknown
        # Of a single run: its status in the bar.
        self._status: Shown | None = None
        self._shown: list[Shown] = []
        self._tabs: dict[str, elements.Text] = {}
        self._bar = ui.element("header").classes("bar")
        self._body = ui.element("div").classes("page")
        self._draw_bar()

    def open(self, name: str, query: Mapping[str, str]) -> None:
        ui.page_title(f"{', '.join(self._runs)} · {VIEWS[name].title} · megasync")
        for key, tab in self._tabs.items():
            tab.props("aria-current=page" if key == name else "", remove="" if key == name else "aria-current")
        self._draw_body(name, query)

    def _turn_to(self, name: str) -> None:
        """Another view, without loading the page again."""
        ui.navigate.history.push(address(name, list(self._runs)))
        ui.run_javascript("scrollTo(0, 0)")
        self.open(name, {})

    async def refresh(self) -> None:
        for run in self._runs.values():
            await run.refresh()
        for shown in self._shown:
            shown.catch_up()

    def _draw_bar(self) -> None:
        with self._bar:
            with ui.element("div").classes("bar-top"):
                if not self._source.single:
                    elements.text("a", "All runs", "brand").props('href="./" data-key="0" title="All runs (key 0)"')
                    elements.text("span", "/", "crumb")
                self._draw_names()
            with ui.element("nav").classes("tabs").props('aria-label="Views"'):
                for number, (key, view) in enumerate(VIEWS.items(), start=1):
                    tab = self._tabs[key] = elements.text("a", view.title).props(f'data-key="{number}"')
                    tab.props["href"] = address(key, list(self._runs))
                    tab.on("click", partial(self._turn_to, key), js_handler=TURN)

    def _draw_names(self) -> None:
        if len(self._runs) != 1:
            elements.text("span", f"{len(self._runs)} runs", "run-name")
            return
        ((name, run),) = self._runs.items()
        elements.text("span", name, "run-name")
        self._status = Shown([run], elements.status_line(_folder(run)))

    def _watch(self, runs: Sequence[OpenRun], update: Update | None) -> None:
        self._shown.append(Shown(runs, update))

    def _draw_body(self, name: str, query: Mapping[str, str]) -> None:
        view, runs = VIEWS[name], list(self._runs.values())
        self._shown = [self._status] if self._status is not None else []
        self._body.clear()
        with self._body:
            for missing in self._unknown:
                elements.notice(f"There is no run {missing!r} in {self._source.target}.")
            if view.across:
                place = Place(name, "", tuple(self._runs), query)
                folders = [_folder(run) for run in runs]
                self._watch(runs, _attempt(lambda: view.build(folders, place)))
                return
            with ui.element("div").classes("run-columns" if len(runs) > 1 else ""):
                for key, run in self._runs.items():
                    self._draw_column(view, run, Place(name, key, tuple(self._runs), query))

    def _draw_column(self, view: View, run: OpenRun, place: Place) -> None:
        folder = _folder(run)
        with ui.element("section").classes("run-column"):
            if len(self._runs) > 1:
                with ui.element("div").classes("run-head"):
                    elements.text("a", place.run).props["href"] = address(place.view, [place.run])
                    self._watch([run], elements.status_line(folder))
            self._watch([run], _attempt(lambda: view.build(folder, place)))


def application(target: Path, reconnect_seconds: float) -> FastAPI:
    """The page of the runs under `target`. Raises ConfigError if there is none."""
    source = OpenRuns(target)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    def front() -> Response | None:
        if source.single:
            return RedirectResponse(address(FIRST, list(source.paths())))
        _head()
        runs = RunList(source.target, source.paths, FIRST)
        # At once, too: reading many runs takes longer than building a page may.
        ui.timer(REFRESH_SECONDS, runs.refresh)
        return None

    def page_of(name: str) -> Callable[[Request], object]:
        async def show(request: Request) -> None:
            await _show(source, name, request)

        return show

    ui.page("/", response_timeout=BUILD_SECONDS)(front)
    for name in VIEWS:
        ui.page(f"/{name}", response_timeout=BUILD_SECONDS)(page_of(name))
    ui.run_with(
        app,
        title="megasync",
        favicon=ICON,
        dark=None,
        tailwind=False,
        reconnect_timeout=reconnect_seconds,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    return app


async def _show(source: OpenRuns, name: str, request: Request) -> None:
    _head()
    wanted = list(dict.fromkeys(request.query_params.getlist("run"))) or list(source.paths())[:1]
    runs = {run: folder for run in wanted if (folder := source.open(run)) is not None}
    await asyncio.gather(*(run.refresh() for run in runs.values()))
    screen = Screen(source, runs, [run for run in wanted if run not in runs])
    screen.open(name, {key: value for key, value in request.query_params.items() if key != "run"})
    ui.timer(REFRESH_SECONDS, screen.refresh, immediate=False)


def _head() -> None:
    ui.add_head_html(f"<style>{STYLE}</style><script>{SCRIPT}</script>")


def _folder(run: OpenRun) -> RunFolder:
    assert run.folder is not None, "a run is read before it is drawn"
    return run.folder


def _attempt(draw: Callable[[], T]) -> T | None:
    """Draws; a view that fails says so in its place, and the rest of the page goes on."""
    try:
        return draw()
    except Exception as error:
        log.exception("drawing a view failed")
        elements.notice(f"This part cannot be drawn: {type(error).__name__}: {error}", bad=True)
        return None
