"""Reads the traces of a run (`observe.trace`), also while they are written.

A segment that vanishes between two looks, a last line that is still being written and a damaged line cost nothing but
themselves: `TraceReader` skips them and counts the damaged ones.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.errors import DataError, raised_as
from megasync.observe.events import LATEST_TIME
from megasync.observe.trace import LANES, TRACE_FOLDER, ChromeEvent, process_of, segments
from megasync.watch.growing_file import GrowingFile


@prepared
class Span(msgspec.Struct, frozen=True, gc=False):
    """Work of one process, in seconds since the epoch on the driver's clock. An instant ends when it starts.

    Spans of one process, track and lane do not overlap.
    """

    process: str
    track: str
    lane: int
    name: str
    start: float
    end: float
    args: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        return self.end - self.start


class TraceReader:
    """Reads each byte of a run's traces once.

    With `most_bytes` the first reading takes no more than that, the newest of each file in equal shares.
    """

    def __init__(self, run_dir: Path, most_bytes: int | None = None) -> None:
        self._folder = Path(run_dir) / TRACE_FOLDER
        self._most = most_bytes
        # Whether something older was left out.
        self.partial = False
        # Bytes read in all, also of segments that are gone.
        self.taken = 0
        self._files: dict[Path, GrowingFile] = {}
        self._lines = msgspec.json.Decoder(list[ChromeEvent])
        self._damaged = 0

    @property
    def damaged(self) -> int:
        """Lines that could not be read."""
        return self._damaged + sum(file.left_out for file in self._files.values())

    def update(self) -> list[Span]:
        """The spans that were written since the last call, by process and in the order of their ends."""
        paths = segments(self._folder)
        if self._most is not None and paths:
            for path in paths:
                with suppress(OSError):
                    self.partial |= self._file(path).skip_to_last(self._most // len(paths))
            self._most = None
        return [span for path in paths for span in self.update_from(path)]

    def stored(self) -> int:
        """Bytes that the traces hold now."""
        sizes = 0
        for path in segments(self._folder):
            with suppress(OSError):
                sizes += path.stat().st_size
        return sizes

    def update_from(self, path: Path) -> Iterator[Span]:
        """The spans that were added to one segment since it was last read."""
        process = process_of(path)
        with suppress(OSError):
            for lines in self._file(path).read()[1]:
                self.taken += sum(len(line) + 1 for line in lines)
                for event in self._decode(lines):
                    start = event.ts / 1e6
                    end = start + max(0, event.dur) / 1e6
                    if event.ph in "Xi" and 0 <= start <= end <= LATEST_TIME:
                        yield Span(process, event.cat, event.tid % LANES, event.name, start, end, event.args)

    def _file(self, path: Path) -> GrowingFile:
        return self._files.get(path) or self._files.setdefault(path, GrowingFile(path))

    def _decode(self, lines: Sequence[bytes]) -> list[ChromeEvent]:
        """The events of lines: all at once, or one after the other if some are damaged."""
        events = b"\n".join(lines).removeprefix(b"[").strip(b",\n")
        try:
            return self._lines.decode(b"[%b]" % events)
        except (ValueError, RecursionError):
            if len(lines) > 1:
                return [event for line in lines for event in self._decode([line])]
            self._damaged += 1
            return []


def write_perfetto(run_dir: Path, out: Path) -> int:
    """Merges the traces of all processes of a run into one file of Chrome JSON; compressed if it ends in `.gz`.

    Returns the number of spans and instants. Raises DataError if the run has no trace, or `out` cannot be written.
    """
    paths = segments(Path(run_dir) / TRACE_FOLDER)
    if not paths:
        raise DataError(f"{run_dir} has no trace: {TRACE_FOLDER}/ is empty or missing (observe.trace)")
    failed = raised_as(DataError, f"cannot write {out}")
    with failed, gzip.open(out, "wb") if out.suffix == ".gz" else out.open("wb") as file:
        return _merge(paths, TraceReader(run_dir), file)


def _merge(paths: list[Path], reader: TraceReader, file: IO[bytes] | gzip.GzipFile) -> int:
    """Numbers processes and threads anew: process ids of several hosts and of restarted processes are ambiguous."""
    encode = msgspec.json.Encoder().encode
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str, int], int] = {}
    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    separator = b""
    for path in paths:
        for span in reader.update_from(path):
            events: list[ChromeEvent] = []
            if (pid := processes.get(span.process)) is None:
                pid = processes[span.process] = len(processes) + 1
                events.append(ChromeEvent("M", "process_name", pid, 0, args={"name": span.process}))
                events.append(ChromeEvent("M", "process_sort_index", pid, 0, args={"sort_index": pid}))
            thread = (span.process, span.track, span.lane)
            if (tid := threads.get(thread)) is None:
                tid = threads[thread] = len(threads) + 1
                title = f"{span.track} {span.lane + 1}" if span.lane else span.track
                events.append(ChromeEvent("M", "thread_name", pid, tid, args={"name": title}))
            at, duration = round(span.start * 1e6), round(span.seconds * 1e6)
            if duration > 0:
                event = ChromeEvent("X", span.name, pid, tid, at, duration, cat=span.track, args=span.args)
            else:
                event = ChromeEvent("i", span.name, pid, tid, at, cat=span.track, s="p", args=span.args)
            for each in (*events, event):
                file.write(separator + encode(each))
                separator = b",\n"
            count += 1
    file.write(b"\n]}\n")
    return count
