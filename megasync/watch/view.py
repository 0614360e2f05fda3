"""What the page and its views agree on.

A view is a file of `views/` with one public function:

    def build(run: RunFolder, place: Place) -> Callable[[], None] | None:

`build` draws one run into the current NiceGUI container, once. It returns `update`, which the page calls after each
`run.refresh()` that read something, about every two seconds of a live run; or None, if nothing in it ever changes.
`update` touches only what changed, so that a reader's scrolling, zoom and open details survive. Both run in the event
loop: work of more than a fraction of a second belongs into a thread (`nicegui.run.io_bound`). A view that compares runs
gets `runs: Sequence[RunFolder]` in place of `run`.

Views are made of `elements` and `chart`, and use the classes and colours of page.css, `var(--ink)` and so on, which
follow the light or dark preference of the system. Nothing is loaded from outside, and nothing that
a run recorded is put into a page as HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

Update = Callable[[], object]


def together(parts: Sequence[Update]) -> Update:
    """Updates all parts of a view, now and with each call of what it returns."""

    def update() -> None:
        for part in parts:
            part()

    update()
    return update


@dataclass(frozen=True)
class Place:
    """Where a view is: which view of which run, and what else its address says.

    `run` is the run's name in the address, `runs` those of all runs that are open. `query` has the parameters that are
    the view's own, such as the filters that it can be opened with.
    """

    view: str
    run: str
    runs: tuple[str, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict[str, str])

    def link(self, view: str, **query: object) -> str:
        """The address of another view of the same run: `place.link("rollouts", uid="0:17")`. None is left out."""
        return address(view, (self.run,), query)


def address(view: str, runs: Sequence[str], query: Mapping[str, object] | None = None) -> str:
    """The address of a view of some runs, relative to the page's own: it also holds behind a proxy's prefix."""
    pairs: list[tuple[str, object]] = [("run", name) for name in runs]
    pairs += [(key, value) for key, value in (query or {}).items() if value is not None]
    return f"{view}?{urlencode(pairs)}"
