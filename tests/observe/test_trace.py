"""Spans reach the reader as they were, whatever happens to files and processes; a trace is bounded and never raises."""

import asyncio
import gzip
import json
import logging
import os
import time
from itertools import pairwise

import pytest

from megasync.config.schema import ObserveConfig
from megasync.observe import trace
from megasync.watch.spans import TraceReader, write_perfetto


@pytest.fixture(autouse=True)
def stopped():
    yield
    trace.stop()


def start(run_dir, process="driver", **options):
    trace.start(run_dir / "trace", process, **options)


def spans_of(run_dir):
    trace.stop()
    return TraceReader(run_dir).update()


def test_a_span_has_its_times_and_arguments(tmp_path):
    start(tmp_path)
    before = time.time()
    with trace.span("trainer", "train", step=3) as args:
        args["tokens"] = 17
    after = time.time()
    (span,) = spans_of(tmp_path)
    assert (span.process, span.track, span.lane, span.name) == ("driver", "trainer", 0, "train")
    assert span.args == {"step": 3, "tokens": 17}
    assert before - 1e-5 <= span.start <= span.end <= after + 1e-5


def test_a_span_that_raises_is_recorded_with_its_error(tmp_path):
    start(tmp_path)
    with pytest.raises(ValueError, match="no"), trace.span("trainer", "train"):
        raise ValueError("no")
    (span,) = spans_of(tmp_path)
    assert span.args == {"error": "ValueError"}


def test_nothing_is_written_before_start_and_after_stop(tmp_path):
    with trace.span("trainer", "train") as args:
        args["step"] = 1
    trace.instant("faults", "rank 1")
    start(tmp_path)
    trace.stop()
    trace.complete("buffer", "finished", 1.0, 2.0)
    assert spans_of(tmp_path) == []


def test_overlapping_spans_of_a_track_get_lanes_of_their_own(tmp_path):
    start(tmp_path)
    for begin, end in [(0, 3), (1, 4), (3, 5), (2, 6), (6, 7)]:
        trace.complete("generate", "g", begin, end)
    lanes: dict[int, list] = {}
    for span in spans_of(tmp_path):
        lanes.setdefault(span.lane, []).append((span.start, span.end))
    assert len(lanes) == 3
    for lane in lanes.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(lane))


def test_times_are_on_the_clock_of_the_driver(tmp_path):
    start(tmp_path, clock_offset=-2.5)
    trace.complete("generate", "g", 10.0, 11.0)
    (span,) = spans_of(tmp_path)
    assert (span.start, span.end) == (7.5, 8.5)


def test_arguments_of_any_type_are_written(tmp_path):
    start(tmp_path)
    trace.instant("faults", "lost", where=tmp_path, none=None, error=ValueError("x"))
    (span,) = spans_of(tmp_path)
    assert span.args == {"where": str(tmp_path), "none": None, "error": "x"}
    assert span.start == span.end


def test_the_segments_of_a_process_stay_below_its_limit(tmp_path):
    limit = 600_000
    for _ in range(3):
        start(tmp_path, limit_bytes=limit)
        for number in range(5_000):
            trace.complete("t", f"span {number}", number, number + 1)
        trace.stop()
    files = list((tmp_path / "trace").iterdir())
    # Each of the two segments may exceed its half by one batch.
    assert sum(path.stat().st_size for path in files) < limit + 2 * trace.BATCH * 120
    assert TraceReader(tmp_path).update()[-1].name == "span 4999"


def test_the_shares_of_all_processes_stay_below_the_limit_of_a_run():
    ranks, workers = 1024, 40
    settings = ObserveConfig(trace_mb=256)
    of_rank, of_worker = trace.share_bytes(settings, ranks), trace.share_bytes(settings, 1 + workers)
    assert of_rank * ranks + of_worker * (1 + workers) <= 256 * 2**20
    assert trace.share_bytes(ObserveConfig(trace_mb=10**6), 2) == trace.LIMIT_BYTES


def test_a_process_without_a_share_writes_no_trace(tmp_path):
    with trace.recording(tmp_path, "driver", trace.share_bytes(ObserveConfig(trace=False), 1)):
        trace.instant("t", "one")
    assert not (tmp_path / "trace").exists()


def test_a_trace_that_cannot_be_written_ends_with_one_warning(tmp_path, caplog):
    (tmp_path / "trace").write_text("not a folder")
    with caplog.at_level(logging.WARNING, "megasync"):
        logging.getLogger("megasync").propagate = True
        start(tmp_path)
        trace.instant("t", "one")
        trace.stop()
        trace.instant("t", "two")
    (record,) = [record for record in caplog.records if record.name == trace.__name__]
    assert "No further trace of driver" in record.message


def test_a_full_disk_turns_the_trace_off(tmp_path, monkeypatch):
    start(tmp_path)
    monkeypatch.setattr(trace._Writer, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    trace.instant("t", "one")
    trace._writer._stopping.set()
    trace._writer._thread.join()
    assert trace._writer is None
    with trace.span("t", "two"):
        pass


def test_each_segment_is_a_json_array_without_its_bracket(tmp_path):
    start(tmp_path, "worker-3")
    trace.complete("tool", "python", 5.0, 6.5, uid="0:1")
    trace.stop()
    (path,) = (tmp_path / "trace").iterdir()
    name, lane, event = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert path.name == "worker-3-1.json"
    assert (name["ph"], name["args"]) == ("M", {"name": "worker-3"})
    assert (lane["ph"], lane["args"]) == ("M", {"name": "tool"})
    assert event == {
        **{"ph": "X", "name": "python", "pid": os.getpid(), "tid": lane["tid"], "cat": "tool"},
        **{"ts": 5_000_000, "dur": 1_500_000, "args": {"uid": "0:1"}},
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_one_file_has_the_spans_of_all_processes(tmp_path, name):
    for process in ("driver", "trainer-0"):
        start(tmp_path, process)
        trace.complete("rank", "load", 1.0, 2.0)
        trace.complete("rank", "score", 1.5, 2.5)
        trace.instant("faults", "lost")
        trace.stop()
    out = tmp_path / name
    assert write_perfetto(tmp_path, out) == 6
    data = out.read_bytes()
    events = json.loads(gzip.decompress(data) if name.endswith("gz") else data)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["driver", "trainer-0"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 4
    assert len({(event["pid"], event["tid"]) for event in spans}) == 4


def test_spans_of_a_block_and_of_its_tasks_have_what_they_are_about(tmp_path):
    start(tmp_path)

    async def group():
        with trace.about(uid="0:1"):
            await asyncio.gather(sample(0), sample(1))

    async def sample(number):
        with trace.about(sample=number), trace.span("generate", "generate", turn=0):
            await asyncio.sleep(0)

    asyncio.run(group())
    spans = spans_of(tmp_path)
    assert sorted((span.args["uid"], span.args["sample"], span.args["turn"]) for span in spans) == [
        ("0:1", 0, 0),
        ("0:1", 1, 0),
    ]


def test_a_span_may_begin_in_one_place_and_end_in_another(tmp_path):
    start(tmp_path)
    before = time.time()
    trace.begin("buffer", "finished", "0:1")
    trace.begin("buffer", "finished", "0:2")
    time.sleep(0.01)
    trace.end("buffer", "finished", "0:1", step=4)
    (span,) = spans_of(tmp_path)
    assert (span.name, span.args) == ("finished", {"uid": "0:1", "step": 4})
    assert before - 1e-5 <= span.start < span.end - 0.005


def test_a_span_whose_begin_comes_late_took_no_time(tmp_path):
    start(tmp_path)
    trace.end("buffer", "finished", "0:1", step=4)
    trace.begin("buffer", "finished", "0:1")
    trace.end("buffer", "finished", "0:2", step=5)
    spans = spans_of(tmp_path)
    assert [span.args["uid"] for span in spans] == ["0:1", "0:2"]
    assert all(0 < span.seconds < 1e-4 for span in spans)


def test_of_a_large_trace_the_newest_part_of_each_file_is_read(tmp_path):
    for process in ("driver", "trainer-0"):
        start(tmp_path, process)
        for number in range(1_000):
            trace.complete("t", f"span {number}", number, number + 1)
        trace.stop()
    reader = TraceReader(tmp_path, most_bytes=20_000)
    spans = reader.update()
    assert reader.partial and reader.damaged == 0
    assert 50 < len(spans) < 250
    assert {(span.process, span.name) for span in spans} >= {("driver", "span 999"), ("trainer-0", "span 999")}
    start(tmp_path, "driver")
    trace.instant("t", "later")
    trace.stop()
    assert [span.name for span in reader.update()] == ["later"]
