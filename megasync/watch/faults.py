"""The faults of a run, from its events: what died, hung or failed, when it worked again, and when training went on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megasync.observe.events import FAULT, RECOVERY, TRAINING, Event


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that died, hung or failed, and how long it took. None means "not yet", or that it is not known."""

    what: str
    time: float
    text: str
    # When it worked again, and the seconds from the fault to the end of the next trained step.
    recovered: float | None = None
    seconds_to_next_step: float | None = None
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


def faults(events: Iterable[Event], step_times: Sequence[float] = ()) -> list[Fault]:
    """The faults by time, each with when what it names recovered, and with the time to the next trained step.

    ``step_times`` are when steps were trained, by the metrics. Those of steps that were trained again are gone; the
    events remember the first step after each fault.
    """
    ordered = sorted(events, key=lambda event: event.time)
    recovered: dict[str, list[float]] = {TRAINING: list(step_times)}
    for event in ordered:
        if event.kind == RECOVERY:
            recovered.setdefault(event.what, []).append(event.time)
    recovered[TRAINING].sort()
    periods = []
    for event in ordered:
        if event.kind == FAULT:
            step = _next(recovered[TRAINING], event.time)
            periods.append(
                Fault(
                    what=event.what,
                    time=event.time,
                    text=event.text,
                    recovered=_next(recovered.get(event.what, ()), event.time),
                    seconds_to_next_step=None if step is None else step - event.time,
                    fields=event.fields,
                )
            )
    return periods


def _next(times: Sequence[float], after: float) -> float | None:
    place = bisect_left(times, after)
    return times[place] if place < len(times) else None
