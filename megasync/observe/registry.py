"""Every metric of a run, its name, unit and meaning, as the tables of `metrics.md` beside this file list them.

Tests hold the names in the source and those that real runs log against it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PAGE = Path(__file__).with_name("metrics.md")
_ROW = re.compile(
    r"^\| `(?P<name>[^`]+)` \| (?P<unit>[^|,]*)(?P<counts>, counts)? \| (?P<meaning>.+) \|$", re.MULTILINE
)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
# A part of a name that the configuration or a user's function chooses; it matches any text without a slash, or, with
# three dots, with slashes too.
_PART = re.compile(r"<([a-z ]+)(\.\.\.)?>")


@dataclass(frozen=True, slots=True)
class Metric:
    """`counts` are since a start and only grow; other metrics are of the step, or of the moment."""

    name: str
    unit: str
    meaning: str
    counts: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        parts, at = "", 0
        for part in _PART.finditer(self.name):
            parts += re.escape(self.name[at : part.start()]) + ("(.+)" if part[2] else "([^/]+)")
            at = part.end()
        return re.compile(parts + re.escape(self.name[at:]))

    @property
    def parts(self) -> tuple[str, ...]:
        """The texts between the brackets, in the order of the pattern's groups."""
        return tuple(part[1] for part in _PART.finditer(self.name))


# In the order of the page, without its links.
METRICS = tuple(
    Metric(line["name"], line["unit"], _LINK.sub(r"\1", line["meaning"]), line["counts"] is not None)
    for line in _ROW.finditer(PAGE.read_text(encoding="utf-8"))
)


@lru_cache(maxsize=4096)
def metric_of(name: str) -> Metric | None:
    """The metric that a logged name belongs to; None if it is unknown. Exact names come before patterns."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)
