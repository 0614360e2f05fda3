"""The one object that every part of a run is built with: where it reports, what it may know of versions, the clock.

Whoever puts a run together makes the sinks first, and each part is complete after its constructor. The defaults are
those of a part without a run around it: an evaluation, a benchmark, a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megasync.observe.events import EventSink, NoEvents
from megasync.observe.hang import HangSink, NoReports


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The surroundings of the parts of a run."""

    # Records faults and recoveries.
    events: EventSink = field(default_factory=NoEvents)
    # Writes hang reports.
    reports: HangSink = field(default_factory=NoReports)
    # The newest weight version that any server may hold; None where it is unknown.
    newest_version: Callable[[], int | None] = lambda: None
    # Seconds from any point in time.
    clock: Callable[[], float] = time.monotonic
