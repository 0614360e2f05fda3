"""Spans of this process's work, written as Chrome JSON: `trace/<process>-<n>.json` in the run directory.

    with trace.recording(run_dir, "worker-0"):
        with trace.about(uid="0:17"), trace.span("generate", "generate", turn=2) as args:
            ...
            args["tokens"] = 118

A module-level API like `logging`: every function has no effect until `start`, and none of them ever raises into the
program. A span costs its process two readings of the clock and an append to a queue; a daemon thread encodes and writes
the queue once a second. What cannot be written turns tracing off, with one warning.

Each file is a JSON array with one event a line and without its closing bracket, which Perfetto and chrome://tracing
open as it is. A process writes segments of half its limit, and whenever it begins one it removes its oldest until the
others fit into the other half: `_Writer._begin_segment` guarantees the bound. Times are microseconds since the epoch on
the clock of the driver, whose offset `start` gets.

A track is a lane of the timeline. Spans of one track that overlap in time get lanes of their own (`_Track`); the thread
id of an event is `track number * LANES + lane`, and its category is the track.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
import numpy as np

from megasync.concurrency.first_use import prepared
from megasync.config.schema import ObserveConfig

log = logging.getLogger(__name__)

TRACE_FOLDER = "trace"
# Bytes of all segments of a process, some 700,000 spans; less where the share of `observe.trace_mb` is less.
LIMIT_BYTES = 128 * 2**20
# Between two writes. A killed process loses the spans of this time.
FLUSH_SECONDS = 1.0
# Spans that wait to be written; where they arrive faster than they can be written, the oldest are lost.
PENDING = 200_000
# Spans of `begin` that may be open; beyond these the oldest are forgotten.
OPEN = 100_000
# Encoded together, so that a segment exceeds its limit by no more than these.
BATCH = 1_000
# Lanes per track that have thread ids of their own.
LANES = 100_000

# Track, name, start and end in seconds since the epoch on this host's clock, and arguments. An instant has no end.
_Event = tuple[str, str, float, float | None, dict[str, Any]]


_about: ContextVar[dict[str, Any]] = ContextVar("about")
_NOTHING: dict[str, Any] = {}


def share_bytes(settings: ObserveConfig, processes: int) -> int:
    """The limit of one process, of so many trainer ranks or of driver and rollout workers; 0 if there is no trace."""
    if not settings.trace:
        return 0
    # Half is for ranks, half for the others.
    return min(LIMIT_BYTES, settings.trace_mb * 2**20 // 2 // processes)


def start(folder: Path, process: str, limit_bytes: int = LIMIT_BYTES, clock_offset: float = 0.0) -> None:
    """Begins to trace this process under the name `process`, which must be unique within the run.

    With a limit of 0 nothing is traced. `clock_offset` is the seconds to add to this host's clock to get the driver's.
    """
    global _writer
    stop()
    if limit_bytes:
        _writer = _Writer(folder, process, limit_bytes, clock_offset)
        _writer.begin()


def stop() -> None:
    """Writes what is left and ends tracing."""
    global _writer
    writer, _writer = _writer, None
    if writer is not None:
        writer.close()


@contextmanager
def recording(run_dir: Path, process: str, limit_bytes: int = LIMIT_BYTES) -> Iterator[None]:
    """Traces this process within a block; see `start`."""
    start(Path(run_dir) / TRACE_FOLDER, process, limit_bytes)
    try:
        yield
    finally:
        stop()


@contextmanager
def about(**args: Any) -> Iterator[None]:
    """Adds arguments to all spans of a block, and of the tasks that are created in it."""
    if _writer is None:
        yield
        return
    token = _about.set({**_about.get(_NOTHING), **args})
    try:
        yield
    finally:
        _about.reset(token)


def span(track: str, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
    """A context whose time is recorded as a span. It yields `args`, to which the block may add.

    A block that raises is recorded with the name of its exception under `error`.
    """
    return _OFF if _writer is None else _Timed(_writer, track, name, {**_about.get(_NOTHING), **args})


def complete(track: str, name: str, start: float, end: float, **args: Any) -> None:
    """Records a span from `start` to `end`, in seconds since the epoch on this host's clock."""
    if _writer is not None:
        _writer.pending.append((track, name, start, end, args))


def begin(track: str, name: str, uid: str) -> None:
    """Begins a span about a group that `end` completes, from anywhere in this process."""
    if _writer is not None:
        _writer.begun(track, name, uid)


def end(track: str, name: str, uid: str, **args: Any) -> None:
    """Completes a span of `begin`. One that begins only later, because its news came late, took no time."""
    if _writer is not None:
        started = _writer.ended(track, name, uid)
        _writer.pending.append((track, name, started, time.time(), {"uid": uid, **args}))


def instant(track: str, name: str, **args: Any) -> None:
    """Records a moment: now."""
    if _writer is not None:
        _writer.pending.append((track, name, time.time(), None, args))


class _Timed:
    """The context of `span`."""

    __slots__ = ("_args", "_name", "_start", "_track", "_writer")

    def __init__(self, writer: _Writer, track: str, name: str, args: dict[str, Any]) -> None:
        self._writer, self._track, self._name, self._args = writer, track, name, args

    def __enter__(self) -> dict[str, Any]:
        self._start = time.time()
        return self._args

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._args["error"] = kind.__name__
        self._writer.pending.append((self._track, self._name, self._start, time.time(), self._args))


class _Off(nullcontext[dict[str, Any]]):
    """The context of `span` while nothing is traced."""

    def __enter__(self) -> dict[str, Any]:
        return {}


_OFF = _Off({})


@prepared
class ChromeEvent(msgspec.Struct, omit_defaults=True, gc=False):
    """One line of a segment: a span (ph "X"), an instant ("i") or a name of a process or thread ("M").

    `ts` and `dur` are microseconds.
    """

    ph: str
    name: str
    pid: int
    tid: int
    ts: int = 0
    dur: int = -1
    cat: str = ""
    s: str = ""
    args: dict[str, Any] = {}


class _Track:
    """Which lane a span of the track gets: the first whose last span ended before it starts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lanes = 0
        self._ends = np.zeros(8)

    def lane(self, start: float, end: float) -> int:
        """The lane of the next span; spans come in the order of their ends."""
        free = self._ends[: self.lanes] <= start
        lane = int(free.argmax()) if free.any() else self.lanes
        if lane == len(self._ends):
            self._ends = np.concatenate([self._ends, np.zeros(lane)])
        self.lanes = max(self.lanes, lane + 1)
        self._ends[lane] = end
        return lane


class _Writer:
    """Writes the spans of one process. Everything but appending to `pending` happens in its thread, or in `close`."""

    def __init__(self, folder: Path, process: str, limit_bytes: int, clock_offset: float) -> None:
        self.pending: deque[_Event] = deque(maxlen=PENDING)
        # By track, name and group: when a span was begun; None if it was ended before.
        self._open: dict[tuple[str, str, str], float | None] = {}
        self._folder = Path(folder)
        self._process = process
        self._half = limit_bytes // 2
        self._offset = clock_offset
        self._pid = os.getpid()
        self._tracks: dict[str, _Track] = {}
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._file: IO[bytes] | None = None
        self._written = 0
        self._failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)

    def begin(self) -> Self:
        """Starts the thread."""
        self._thread.start()
        atexit.register(self.close)
        return self

    def begun(self, track: str, name: str, uid: str) -> None:
        key = track, name, uid
        if self._open.get(key, 0.0) is None:
            del self._open[key]
        else:
            self._keep(key, time.time())

    def ended(self, track: str, name: str, uid: str) -> float:
        """When the span was begun."""
        started = self._open.pop((track, name, uid), None)
        if started is None:
            self._keep((track, name, uid), None)
            # An instant would have no duration.
            return time.time() - 1e-6
        return started

    def _keep(self, key: tuple[str, str, str], started: float | None) -> None:
        self._open[key] = started
        if len(self._open) > OPEN:
            del self._open[next(iter(self._open))]

    def close(self) -> None:
        """Writes what is left. A forked child has the queue of its parent but not its thread, and writes nothing."""
        if os.getpid() == self._pid:
            self._stopping.set()
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(FLUSH_SECONDS):
                self._flush()
            self._flush()
        except Exception as error:  # tracing must not end the program, whatever went wrong
            self._failed = True
            # An OSError, such as a full disk, needs no traceback; anything else is a bug.
            log.warning(
                *("No further trace of %s: could not write to %s: %s", self._process, self._folder, error),
                exc_info=not isinstance(error, OSError),
            )
            self._turn_off()
        finally:
            if self._file is not None:
                self._file.close()

    def _turn_off(self) -> None:
        global _writer
        if _writer is self:
            _writer = None
        self.pending.clear()

    def _flush(self) -> None:
        """Raises OSError."""
        while count := min(len(self.pending), BATCH):
            batch = [self.pending.popleft() for _ in range(count)]
            if self._file is None or self._written >= self._half:
                self._begin_segment()
            self._write(event for each in batch for event in self._events(*each))

    def _events(
        self, name_of_track: str, name: str, start: float, end: float | None, args: dict[str, Any]
    ) -> Iterable[ChromeEvent]:
        if (track := self._tracks.get(name_of_track)) is None:
            track = self._tracks[name_of_track] = _Track(len(self._tracks))
        at = round((start + self._offset) * 1e6)
        if end is None:
            if not track.lanes:
                track.lanes = 1
                yield self._lane_name(name_of_track, track, 0)
            tid = track.number * LANES
            yield ChromeEvent("i", name, self._pid, tid, at, cat=name_of_track, s="p", args=args)
            return
        lanes = track.lanes
        lane = track.lane(start, end)
        if track.lanes > lanes:
            yield self._lane_name(name_of_track, track, lane)
        duration = max(0, round((end - start) * 1e6))
        tid = track.number * LANES + lane
        yield ChromeEvent("X", name, self._pid, tid, at, duration, cat=name_of_track, args=args)

    def _lane_name(self, name: str, track: _Track, lane: int) -> ChromeEvent:
        title = f"{name} {lane + 1}" if lane else name
        return ChromeEvent("M", "thread_name", self._pid, track.number * LANES + lane, args={"name": title})

    def _write(self, events: Iterable[ChromeEvent]) -> None:
        assert self._file is not None
        data = b"".join(self._encoder.encode(event) + b",\n" for event in events)
        self._file.write(data)
        self._written += len(data)

    def _begin_segment(self) -> None:
        """Opens the next segment, after removing the oldest ones of this process beyond half the limit."""
        if self._file is not None:
            self._file.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        older = segments(self._folder, self._process)
        room = self._half
        for path in reversed(older):
            room -= path.stat().st_size
            # The newest is kept: it may exceed its half by a batch.
            if room < 0 and path != older[-1]:
                path.unlink()
        number = 1 + (segment_number(older[-1]) if older else 0)
        # Unbuffered: what is written is visible to readers. Exclusive: never appends to another process's file.
        self._file = open(self._folder / f"{self._process}-{number}.json", "xb", buffering=0)  # noqa: SIM115
        self._file.write(b"[\n")
        self._written = 2
        self._write([ChromeEvent("M", "process_name", self._pid, 0, args={"name": self._process})])
        self._write(
            self._lane_name(name, track, lane) for name, track in self._tracks.items() for lane in range(track.lanes)
        )


def process_of(path: Path) -> str:
    """The process that wrote a segment."""
    return path.stem.rpartition("-")[0]


def segment_number(path: Path) -> int:
    """The place of a segment among those of its process; -1 if the name is no segment's."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def segments(folder: Path, process: str | None = None) -> list[Path]:
    """The segments in a folder, of one process or of all, oldest first."""
    paths = [path for path in folder.glob("*.json") if segment_number(path) >= 0]
    if process is not None:
        paths = [path for path in paths if process_of(path) == process]
    return sorted(paths, key=lambda path: (process_of(path), segment_number(path)))


_writer: _Writer | None = None
