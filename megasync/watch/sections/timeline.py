"""A few steps on the timeline: what every process did when, and what a step's time was spent on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megasync.observe.trace import TRACE_FOLDER
from megasync.watch import units
from megasync.watch.document import Cell, Chart, Section, Table, Text, chart, seconds
from megasync.watch.run_folder import RunFolder
from megasync.watch.spans import TraceReader
from megasync.watch.timeline import MOST_BYTES, TRAIN, Step, Timeline
from megasync.watch.timeline_figure import still_figure

# Steps of a figure, and bars that it is drawn with.
STEPS, MOST_BARS = 3, 1_200
# A figure without a step shows this many seconds.
MOST_SECONDS = 60.0


def timeline(run: RunFolder) -> Section:
    section = Section("A few steps on the timeline")
    reader, traced = TraceReader(run.path, MOST_BYTES), Timeline()
    if not traced.add(reader.update()):
        section.add(Text(f"The run left no trace: {TRACE_FOLDER}/ is missing or empty (observe.trace)."))
        return section
    steps = traced.steps()
    notes = [f"The trace has {len(traced):,} spans of {units.counted(len(steps), 'whole step')}."]
    if reader.partial:
        notes.append(f"Only its newest {units.size(MOST_BYTES)} were read.")
    if reader.damaged:
        notes.append(
            f"{units.counted(reader.damaged, 'damaged line')} {'was' if reader.damaged == 1 else 'were'} left out."
        )
    section.add(Text(" ".join(notes)))
    last = steps[-STEPS:]
    section.add(_figure(traced, last, f"What every process did during {_named(last)}."), _phases(last, steps))
    if around := _around_the_longest_fault(run, steps):
        what, those = around
        caption = f"The same around the fault of {what} that delayed training most: {_named(those)}."
        section.add(_figure(traced, those, caption))
    return section


def _figure(traced: Timeline, steps: Sequence[Step], caption: str) -> Chart | None:
    """Some steps that follow one another; without steps the end of the trace."""
    start = steps[0].start if steps else max(traced.start, traced.end - MOST_SECONDS)
    picture = traced.picture(start, steps[-1].end if steps else traced.end, MOST_BARS)
    dense = any(row.density for row in picture.rows)
    note = " A row with too many spans to draw is as high as spans were in progress." if dense else ""
    lines = " Vertical lines are the ends of steps." if len(steps) > 1 else ""
    return chart(still_figure(picture, start, [step.end for step in steps[:-1]]), f"{caption}{lines}{note}", wide=True)


def _named(steps: Sequence[Step]) -> str:
    if not steps:
        return "the last seconds of the trace"
    first, last = steps[0].number, steps[-1].number
    return f"step {last}" if len(steps) == 1 else f"steps {first} to {last}"


def _phases(shown: Sequence[Step], steps: Sequence[Step]) -> Table | None:
    """Seconds by phase of the steps that are drawn, and the mean of all; each column adds up."""
    if not steps:
        return None

    def row(label: str, of: list[float]) -> Sequence[Cell]:
        return (label, *map(seconds, of[-len(shown) :]), seconds(sum(of) / len(of)))

    def rows(lead: str, phases: list[dict[str, float]]) -> list[Sequence[Cell]]:
        totals = Counter[str]()
        for each in phases:
            totals.update(each)
        return [row(f"{lead}{name}", [each.get(name, 0.0) for each in phases]) for name, _ in totals.most_common()]

    lines: list[Sequence[Cell]] = []
    for each in rows("", [step.phases for step in steps]):
        lines.append(each)
        if each[0] == TRAIN:
            lines += rows(f"{TRAIN}, rank 0: ", [step.of_train for step in steps])
    lines.append(row("the step", [step.seconds for step in steps]))
    headings = ("Phase", *(f"Step {step.number}" for step in shown), f"Mean of {len(steps)}")
    return Table(
        "What the time of these steps was spent on. Phases do not overlap and add up to the step; those of rank 0 add "
        f"up to {TRAIN!r}.",
        headings,
        lines,
    )


def _around_the_longest_fault(run: RunFolder, steps: Sequence[Step]) -> tuple[str, list[Step]] | None:
    """The fault with the longest time to the next step, and the traced steps around it."""
    faults = [
        (fault.seconds_to_next_step, at, fault.what)
        for fault in run.faults
        for at, step in enumerate(steps)
        if fault.seconds_to_next_step is not None and step.start <= fault.time < step.end
    ]
    if not faults:
        return None
    _, at, what = max(faults)
    return what, list(steps[max(0, at - 1) : at + 2])
