"""The state is read as it was written, also by other versions, and is never half a file."""

import json
import threading

import msgspec

from megasync.observe.state_file import (
    STATE_FILE,
    BufferState,
    ProcessState,
    RankState,
    RunState,
    read_state,
    write_state,
)

STATE = RunState(
    time=100.5,
    pid=7,
    host="here",
    started=90.0,
    status="running",
    step=3,
    total_steps=10,
    version=3,
    activities={"trainer": ("training", 99.0)},
    servers=[ProcessState(name="server-0", state="healthy", since=95.0, url="http://127.0.0.1:1", version=3)],
    ranks=[RankState(rank=0, pid=8, node="abc")],
    buffer=BufferState(slots={"finished": 2}, capacity=8, admitted=5, trained=3, live=2, waiting={"lease": "groups"}),
    eta_seconds=12.0,
)


def test_a_state_is_one_plain_json_object_and_read_as_it_was_written(tmp_path):
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) == STATE
    row = json.loads((tmp_path / STATE_FILE).read_text())
    assert row["activities"] == {"trainer": ["training", 99.0]} and row["servers"][0]["name"] == "server-0"


def test_states_of_other_versions_can_be_read(tmp_path):
    (tmp_path / STATE_FILE).write_text('{"time": 1.0, "status": "finished", "of_the_future": [1]}')
    assert read_state(tmp_path) == RunState(time=1.0, status="finished")


def test_a_missing_or_damaged_state_is_none(tmp_path):
    assert read_state(tmp_path) is None
    for damaged in ('{"time": 1.0', "[]", '{"status": "running"}', '{"time": 1.0, "servers": 3}'):
        (tmp_path / STATE_FILE).write_text(damaged)
        assert read_state(tmp_path) is None


def test_a_reader_never_sees_a_part_of_a_state(tmp_path):
    write_state(tmp_path, STATE)
    done = threading.Event()

    def replace():
        for step in range(300):
            write_state(tmp_path, msgspec.structs.replace(STATE, step=step))
        done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    while not done.is_set():
        assert read_state(tmp_path) is not None
    writer.join()
