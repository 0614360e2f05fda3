"""The timeline of a run as a pure model: spans in, rows of bars out, however many spans there are.

    spans ──▶ tracks (one of each process and kind of work) ──▶ `picture(start, end)`: rows of bars
                                                           ├──▶ `steps()`: phases that add up to a step
                                                           └──▶ `life(uid)`: one group across processes

Invariants: a picture has at most `most` bars, whatever the zoom (`_Track.bars`). A row that holds more spans than its
share, or more at a time than it has lanes, is drawn as a density: in each of its buckets a bar as high as spans were in
progress, in the colour of what took the most time. Processes of one kind beyond `MOST_ALIKE` share rows. The phases of
a step never overlap and their sum is its duration: what no span covers is `OTHER` (`_split`).
"""

from __future__ import annotations

import heapq
import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasync.watch.spans import Span

Floats = NDArray[np.float64]

# Bars of a picture: as many as a browser draws smoothly.
MOST_BARS = 2_500
# More processes of one kind share their rows.
MOST_ALIKE = 6
# Spans at a time that a row can show one above the other.
MOST_LANES = 16
# Kinds of work of a row that have colours of their own in a density.
MOST_NAMES = 8
# What is read of a trace, the newest: some 700,000 spans, which take two seconds.
MOST_BYTES = 128 * 2**20
# Faults and recoveries of a picture.
MOST_MARKS = 200
OTHER = "other"
DRIVER = "driver"
# Tracks of the driver.
TRAINER, SYNC, FAULTS, BUFFER = "trainer", "sync", "faults", "buffer"
# Spans of the trainer's track.
WAIT, TRAIN, PUBLISH = "wait for groups", "train", "publish"
# The order of rows: kinds of processes, and tracks within them.
_KINDS = (DRIVER, "worker", "trainer", "server")
_TRACKS = (TRAINER, "step", "rank", SYNC, BUFFER, "evaluation", "group", "generate", "tool", "reward", "teacher")
_NUMBERED = re.compile(r"(.+)-\d+")
# The driver's tracks of servers, which are rows of their own.
_SERVER, LOAD = re.compile(r"server-\d+"), "load"


@dataclass(frozen=True, slots=True)
class Bar:
    """A span, or with `count` above 1 several of them in a bucket of a density. Times are seconds since the epoch.

    `low` and `high` are its vertical place in its row, from 0 to 1.
    """

    name: str
    start: float
    end: float
    low: float
    high: float
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    count: int = 1


@dataclass(frozen=True, slots=True)
class Track:
    """A track of a process, or of several alike. `density` is whether bars are buckets; `peak`, spans at a time."""

    process: str
    track: str
    bars: list[Bar]
    density: bool
    peak: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: a fault, a recovery, or a profile that was written."""

    time: float
    kind: str
    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The contents of a window of time, as they are drawn."""

    start: float
    end: float
    rows: list[Track]
    marks: list[Mark]


@dataclass(frozen=True, slots=True)
class Step:
    """A step as the driver saw it: from the end of the one before. `phases` are seconds, and add up to its duration.

    `of_train` are the seconds of the first rank within the phase `TRAIN`, and add up to it where they are known. A step
    that was trained again is there twice.
    """

    number: int
    start: float
    end: float
    phases: dict[str, float]
    of_train: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Life:
    """One group from its prompt to the version that its step became. `phases` are seconds that any span of it covers.

    Phases of a life may overlap: some of its responses are scored while others are generated.
    """

    uid: str
    spans: list[Span]
    phases: dict[str, float]
    step: int | None
    outcome: str


class Timeline:
    """Grows with `add`; every other method is a question about what was added."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[str, str], _Track] = {}
        self._marks: list[Mark] = []
        # Of the driver's trainer: everything; of its sync, what all servers go through together.
        self._driver: list[Span] = []
        self._first_rank: list[Span] = []
        self._of_group: defaultdict[str, list[Span]] = defaultdict(list)
        self._of_step: defaultdict[int, list[str]] = defaultdict(list)
        self._steps: list[Step] | None = None
        self.start = float("inf")
        self.end = float("-inf")

    def __len__(self) -> int:
        return sum(len(track) for track in self._tracks.values())

    def add(self, spans: Iterable[Span]) -> bool:
        """Adds spans in any order. Returns whether there were any."""
        some = False
        for span in spans:
            some = True
            self.start, self.end = min(self.start, span.start), max(self.end, span.end)
            if span.track == FAULTS or span.start == span.end:
                self._marks.append(_mark(span))
                continue
            key = span.process, span.track
            if span.process == DRIVER and _SERVER.fullmatch(span.track):
                # What the driver's probes learn of a server.
                key = span.track, LOAD
            if (track := self._tracks.get(key)) is None:
                track = self._tracks[key] = _Track()
            track.add(span)
            if key == (DRIVER, TRAINER):
                self._driver.append(span)
            elif key == ("trainer-0", "rank"):
                self._first_rank.append(span)
            if (uid := span.args.get("uid")) is not None:
                self._of_group[uid].append(span)
                if span.track == BUFFER and isinstance(step := span.args.get("step"), int):
                    self._of_step[step].append(uid)
        if some:
            self._steps = None
        return some

    # The picture

    def picture(self, start: float, end: float, most: int = MOST_BARS) -> Picture:
        """Rows with at most `most` bars in all, of the spans between two times."""
        named = self._named_rows()
        share = max(1, most // max(1, len(named)))
        rows: list[Track] = []
        for (process, track), tracks in named.items():
            bars, density, peak = _merged(tracks).bars(start, end, share)
            rows.append(Track(process, track, bars, density, peak))
        marks = sorted((mark for mark in self._marks if start <= mark.time <= end), key=lambda mark: mark.time)
        return Picture(start, end, rows, marks[:MOST_MARKS])

    def _named_rows(self) -> dict[tuple[str, str], list[_Track]]:
        """The tracks of each row, in the order of the page."""
        alike = Counter(_kind(process) for process in {process for process, _ in self._tracks})
        rows: dict[tuple[str, str], list[_Track]] = {}
        for process, track in sorted(self._tracks, key=_place):
            kind = _kind(process)
            title = process if alike[kind] <= MOST_ALIKE else f"{alike[kind]} {kind}s"
            rows.setdefault((title, track), []).append(self._tracks[process, track])
        return rows

    # Steps

    def steps(self) -> list[Step]:
        """The trained steps in the order of time."""
        if self._steps is None:
            self._steps = _steps(self._driver, self._first_rank)
        return self._steps

    def groups_of(self, step: int) -> list[str]:
        """The uids of the groups that a step took from the buffer."""
        return list(dict.fromkeys(self._of_step.get(step, ())))

    # A group

    def life(self, uid: str) -> Life | None:
        """The history of a group; None if the trace has nothing of it."""
        spans = sorted(self._of_group.get(uid, ()), key=lambda span: (span.start, -span.end))
        if not spans:
            return None
        step = next((span.args["step"] for span in reversed(spans) if span.track == BUFFER), None)
        since = spans[0].start
        if step is not None:
            later = (span for span in self._driver if span.name in (TRAIN, PUBLISH) and span.start >= since)
            spans += [span for span in later if span.args.get("step") == step]
        covered: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            if span.track != "group":
                covered[span.name if span.track == TRAINER else span.track].append((span.start, span.end))
        phases = {name: _covered(intervals) for name, intervals in covered.items()}
        outcome = next((str(span.args.get("outcome", "")) for span in reversed(spans) if span.track == "group"), "")
        return Life(uid, spans, phases, step, outcome)


class _Track:
    """The spans of a track, in columns."""

    def __init__(self) -> None:
        self._starts = array("d")
        self._ends = array("d")
        self._names = array("l")
        self._number: dict[str, int] = {}
        self._args: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        return len(self._args)

    def add(self, span: Span) -> None:
        self._starts.append(span.start)
        self._ends.append(span.end)
        self._names.append(self._number.setdefault(span.name, len(self._number)))
        self._args.append(span.args)

    def extend(self, other: _Track) -> None:
        """Adds the spans of another track."""
        numbers = np.array([self._number.setdefault(name, len(self._number)) for name in other._number], dtype="l")
        self._starts.extend(other._starts)
        self._ends.extend(other._ends)
        self._names.frombytes(numbers[np.array(other._names)].tobytes())
        self._args.extend(other._args)

    def bars(self, start: float, end: float, most: int) -> tuple[list[Bar], bool, float]:
        """At most `most` bars of the spans between two times, whether they are buckets, and the most at a time."""
        starts, ends = np.array(self._starts), np.array(self._ends)
        seen = np.flatnonzero((starts < end) & (ends > start))
        if len(seen) <= most:
            order = seen[np.argsort(starts[seen], kind="stable")]
            lanes, count = _lanes(starts[order], ends[order])
            if count <= MOST_LANES:
                return self._each(order, lanes, count), False, float(count)
        bars, peak = self._density(starts[seen], ends[seen], np.array(self._names)[seen], start, end, most)
        return bars, True, peak

    def _each(self, order: NDArray[np.int64], lanes: Sequence[int], count: int) -> list[Bar]:
        names = list(self._number)
        return [
            Bar(
                names[self._names[index]],
                self._starts[index],
                self._ends[index],
                lane / count,
                (lane + 1) / count,
                self._args[index],
            )
            for index, lane in zip(order.tolist(), lanes, strict=True)
        ]

    def _density(
        self, starts: Floats, ends: Floats, names: NDArray[np.int64], start: float, end: float, most: int
    ) -> tuple[list[Bar], float]:
        edges = np.linspace(start, end, most + 1)
        labels = list(self._number)
        longest = np.bincount(names, ends - starts, minlength=len(labels)).argsort()[::-1][:MOST_NAMES]
        shares = {labels[name]: _in_progress(starts[names == name], ends[names == name], edges) for name in longest}
        rest = ~np.isin(names, longest)
        if rest.any():
            shares[OTHER] = _in_progress(starts[rest], ends[rest], edges)
        table = np.array([*shares.values()])
        total, top = table.sum(axis=0), table.argmax(axis=0)
        peak = float(total.max(initial=0.0))
        begun = np.searchsorted(np.sort(starts), edges)
        ended = np.searchsorted(np.sort(ends), edges)
        counts = begun[1:] - ended[:-1]
        kinds = [*shares]
        return [
            Bar(
                kinds[top[index]],
                float(edges[index]),
                float(edges[index + 1]),
                0.0,
                max(0.08, float(total[index]) / peak),
                {"in progress": round(float(total[index]), 2)},
                int(counts[index]),
            )
            for index in np.flatnonzero(total > 0).tolist()
        ], peak


def _merged(tracks: Sequence[_Track]) -> _Track:
    if len(tracks) == 1:
        return tracks[0]
    merged = _Track()
    for track in tracks:
        merged.extend(track)
    return merged


def _in_progress(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """How many spans were in progress in each bucket, on average [buckets]."""
    reached = _elapsed(starts, edges) - _elapsed(ends, edges)
    return np.maximum(0.0, np.diff(reached) / np.diff(edges))


def _elapsed(times: Floats, edges: Floats) -> Floats:
    """At each edge, the sum over all times of how long ago they were; 0 for those to come."""
    times = np.sort(times)
    sums = np.concatenate([[0.0], np.cumsum(times - edges[0])])
    before = np.searchsorted(times, edges)
    return before * (edges - edges[0]) - sums[before]


def _lanes(starts: Floats, ends: Floats) -> tuple[list[int], int]:
    """The lowest free lane of each span, in the order of their starts, and the number of lanes."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes: list[int] = []
    count = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes, max(1, count)


def _steps(driver: Iterable[Span], rank: Iterable[Span]) -> list[Step]:
    spans = sorted(driver, key=lambda span: span.start)
    trained = [span for span in spans if span.name == TRAIN and "error" not in span.args and "step" in span.args]
    of_rank = sorted(rank, key=lambda span: span.start)
    begins = [span.start for span in spans]
    rank_begins = [span.start for span in of_rank]
    steps: list[Step] = []
    start = spans[0].start if spans else 0.0
    # Those that began before the end of the last step and may go on, and how many have begun.
    within: list[Span] = []
    seen = 0
    for index, train in enumerate(trained):
        until = trained[index + 1].start if index + 1 < len(trained) else float("inf")
        after = spans[bisect_right(begins, train.start) : bisect_right(begins, until)]
        # That after a restart is of the step from which training goes on.
        publishes = (span.end for span in after if span.name == PUBLISH and span.args.get("step") == train.args["step"])
        end = max([start, train.end, *(published for published in publishes if published <= until)])
        reached = bisect_right(begins, end)
        within = [span for span in (*within, *spans[seen:reached]) if span.end > start]
        seen = reached
        phases = _split(within, start, end)
        inside = of_rank[max(0, bisect_right(rank_begins, train.start) - 1) : bisect_right(rank_begins, train.end)]
        of_train = _split(inside, train.start, train.end) if inside else {}
        steps.append(Step(train.args["step"], start, end, phases, of_train))
        start = end
    return steps


def _split(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Seconds by name between two times, and what is left as `OTHER`. Where spans overlap, the later one counts."""
    cuts = sorted({start, end, *(t for span in spans for t in (span.start, span.end) if start < t < end)})
    seconds: defaultdict[str, float] = defaultdict(float)
    ordered = sorted(spans, key=lambda span: span.start)
    for low, high in pairwise(cuts):
        covering = [span.name for span in ordered if span.start <= low and span.end >= high]
        seconds[covering[-1] if covering else OTHER] += high - low
    return dict(seconds)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one interval covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _mark(span: Span) -> Mark:
    if span.track == FAULTS:
        return Mark(span.start, str(span.args.get("kind", "fault")), span.name, str(span.args.get("text", "")))
    what = ", ".join(f"{name} {value}" for name, value in span.args.items())
    return Mark(span.start, span.name, span.process, what)


def _kind(process: str) -> str:
    match = _NUMBERED.fullmatch(process)
    return match[1] if match else process


def _place(key: tuple[str, str]) -> tuple[int, str, int, int, str]:
    process, track = key
    kind = _kind(process)
    number = int(process[len(kind) + 1 :]) if kind != process else 0
    return _index(_KINDS, kind), kind, number, _index(_TRACKS, track), track


def _index(order: Sequence[str], value: str) -> int:
    return order.index(value) if value in order else len(order)
