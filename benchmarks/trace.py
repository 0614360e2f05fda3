"""What tracing costs: the processor time of recording and writing a step's spans, as a share of the step's duration.

    .venv/bin/python benchmarks/trace.py RUN

RUN is a finished run with a trace. For each of its steps and processes, this process records the same spans again, with
the same arguments, through the same writer, and measures its processor time (recording, encoding and writing together).
The share is relative to the duration of that step in the run itself. Prints the median and the largest share over the
steps, of the busiest process of each step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from megasync.observe import trace
from megasync.watch.spans import Span, TraceReader
from megasync.watch.timeline import Timeline

REPEATS = 5


def recorded_again(spans: list[Span], folder: Path) -> float:
    """Processor seconds of recording and writing these spans."""
    trace.start(folder, "benchmark")
    begin = time.process_time()
    for span in spans:
        with trace.span(span.track, span.name, **span.args):
            pass
    trace.stop()
    return time.process_time() - begin


def main(run: str) -> None:
    spans = TraceReader(Path(run)).update()
    timeline = Timeline()
    timeline.add(spans)
    shares: list[float] = []
    counts: list[int] = []
    costs: list[float] = []
    for step in timeline.steps():
        of_process: defaultdict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if step.start <= span.end < step.end:
                of_process[span.process].append(span)
        busiest = max(of_process.values(), key=len)
        with tempfile.TemporaryDirectory() as folder:
            seconds = statistics.median(recorded_again(busiest, Path(folder)) for _ in range(REPEATS))
        shares.append(seconds / step.seconds)
        counts.append(len(busiest))
        costs.append(seconds / len(busiest))
    sys.stdout.write(
        f"{len(shares)} steps, median {statistics.median(counts):.0f} spans of the busiest process in a step\n"
        f"processor time of a span: {1e6 * statistics.median(costs):.1f} us\n"
        f"share of the step: median {statistics.median(shares):.3%}, largest {max(shares):.3%}\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
