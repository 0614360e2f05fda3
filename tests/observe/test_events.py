"""Events survive torn lines and damage, a resumed run appends, and faults find their recovery and the next step."""

import json
import os

import pytest

from megasync.observe.events import EVENTS_FILE, FAULT, MESSAGE, RECOVERY, TRAINING, Event, EventLog, read_events
from megasync.watch.event_reader import EventReader
from megasync.watch.faults import faults


def written(run_dir, *lines, at=100.0):
    events = EventLog(run_dir, clock=lambda: at)
    for kind, text, what in lines:
        events.write(kind, text, what)
    events.close()


def test_an_event_is_read_as_it_was_written(tmp_path):
    events = EventLog(tmp_path, clock=lambda: 100.0)
    events.write(FAULT, "killed\nby\u2028hand", "rank 1", step=3)
    assert read_events(tmp_path) == [Event(100.0, FAULT, "killed\nby\u2028hand", "rank 1", {"step": 3})]


@pytest.mark.parametrize("before", [[], ["whole"]])
def test_a_resumed_run_appends_and_drops_a_torn_last_line(tmp_path, before):
    written(tmp_path, *((MESSAGE, text, "") for text in before))
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"time": 1.0, "ki')
    assert [event.text for event in read_events(tmp_path)] == before
    written(tmp_path, (MESSAGE, "resumed", ""))
    assert [event.text for event in read_events(tmp_path)] == [*before, "resumed"]
    assert all(json.loads(line) for line in (tmp_path / EVENTS_FILE).read_bytes().splitlines())


def test_a_reader_returns_each_event_once_and_waits_for_whole_lines(tmp_path):
    reader = EventReader(tmp_path)
    assert reader.update() == []
    written(tmp_path, (MESSAGE, "a", ""))
    assert [event.text for event in reader.update()] == ["a"]
    line = b'{"time": 2.0, "kind": "message", "text": "b"}\n'
    with (tmp_path / EVENTS_FILE).open("ab", buffering=0) as file:
        file.write(line[:10])
        assert reader.update() == []
        file.write(line[10:])
    assert [event.text for event in reader.update()] == ["b"]


def test_a_reader_leaves_out_and_counts_lines_that_are_no_events(tmp_path):
    lines = (b"not json", b"[1]", b'{"kind": "message"}', b'{"time": "x", "kind": "message"}')
    (tmp_path / EVENTS_FILE).write_bytes(b"\n".join(lines) + b'\n{"time": 1, "kind": "message"}\n')
    reader = EventReader(tmp_path)
    assert reader.update() == [Event(1.0, MESSAGE)] and reader.damaged == len(lines)


def test_a_long_reason_keeps_its_beginning_and_end(tmp_path):
    written(tmp_path, (FAULT, "begin" + "x" * 100_000 + "end", "server-0"))
    (event,) = read_events(tmp_path)
    assert event.text.startswith("begin") and event.text.endswith("end") and len(event.text) < 5_000


def test_a_write_that_was_cut_off_damages_no_other_line(tmp_path, monkeypatch):
    events = EventLog(tmp_path)
    events.write(MESSAGE, "a")
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, line: write(handle, line[:5]))
    with pytest.raises(OSError, match="No space left"):
        events.write(MESSAGE, "lost")
    monkeypatch.undo()
    events.write(MESSAGE, "b")
    assert [event.text for event in read_events(tmp_path)] == ["a", "b"]


def test_a_fault_has_its_recovery_and_the_time_to_the_next_step():
    events = [
        Event(10.0, FAULT, "killed", "rank 1"),
        Event(11.0, FAULT, "killed", "server-0"),
        Event(20.0, RECOVERY, "restarted", "rank 1"),
        Event(50.0, RECOVERY, "restarted", "server-0"),
        Event(70.0, FAULT, "killed", "driver"),
    ]
    rank, server, driver = faults(events, step_times=[9.0, 25.0, 60.0])
    assert (rank.what, rank.recovered, rank.seconds_to_next_step) == ("rank 1", 20.0, 15.0)
    assert (server.what, server.recovered, server.seconds_to_next_step) == ("server-0", 50.0, 14.0)
    assert driver.recovered is None and driver.seconds_to_next_step is None, "nothing followed it"


def test_the_first_step_after_a_fault_counts_although_it_was_trained_again():
    events = [Event(10.0, FAULT, "killed", "server-0"), Event(12.0, RECOVERY, "", TRAINING)]
    (fault,) = faults(events, step_times=[40.0])
    assert fault.seconds_to_next_step == 2.0


def test_a_pipe_in_the_place_of_the_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / EVENTS_FILE)
    with pytest.raises(OSError, match="not a regular file"):
        read_events(tmp_path)
