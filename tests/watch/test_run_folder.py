"""Whatever lies in a run directory can be looked at, and what cannot be read is named."""

import fcntl
import json
import os
import shutil
import socket
import sqlite3

import numpy as np
import pytest
from made_runs import BEGIN, STEP_SECONDS, Clock, made_buffer, make_run
from msgspec import structs

from megasync.errors import ConfigError
from megasync.observe.events import START, EventLog
from megasync.observe.metrics import MetricsLog, read_metrics
from megasync.observe.state_file import write_state
from megasync.watch.run_folder import RunFolder, find_runs


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def row(step, **values):
    return json.dumps({"step": step, "time": BEGIN + step, **values}) + "\n"


def test_a_series_has_the_values_that_were_logged(tmp_path):
    run_dir = make_run(tmp_path)
    run, columns = RunFolder(run_dir), read_metrics(run_dir)
    for name in columns.keys() - {"step", "time"}:
        rows = zip(columns["step"], columns["time"], columns[name], strict=True)
        logged = [row for row in rows if row[2] is not None]
        read = run.series(name).finite
        assert list(zip(read.steps, read.times, read.values, strict=True)) == logged


def test_a_number_that_was_not_finite_is_nan_in_its_place(tmp_path):
    rewards = RunFolder(make_run(tmp_path)).series("train/reward")
    assert rewards.steps[np.isnan(rewards.values)].tolist() == [3] and len(rewards) == 20


def test_a_refresh_reads_only_what_was_appended(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path, status="running")
    run = RunFolder(run_dir)
    assert not run.refresh()
    append(run_dir / "metrics.jsonl", row(21, version=21))
    added = []
    monkeypatch.setattr(run.metrics, "add", added.extend)
    assert added == [] and run.refresh() is False
    assert [json.loads(line)["step"] for line in added] == [21]


def test_rewritten_metrics_are_read_again(tmp_path):
    run_dir = make_run(tmp_path)
    run = RunFolder(run_dir)
    resumed = MetricsLog(run_dir, tensorboard=False, clock=Clock(BEGIN + 500))
    resumed.log(11, {"version": 11, "train/tokens": 1.0})
    resumed.close()
    assert run.refresh()
    assert run.version == 11 and run.series("train/tokens").values[-1] == 1.0
    assert run.series("train/loss").steps.max() == 10


def test_metrics_rewritten_in_place_are_read_again(tmp_path):
    run_dir = make_run(tmp_path, steps=4)
    run, path = RunFolder(run_dir), run_dir / "metrics.jsonl"
    path.write_text("".join(row(step, version=100 + step, note="of the same length or longer") for step in range(90)))
    run.refresh()
    assert run.version == 189 and len(run.metrics) == 90


@pytest.mark.parametrize(
    ("said", "held", "status"),
    [
        *[("finished", False, "finished"), ("stopped", False, "stopped"), ("failed", False, "failed")],
        *[("running", True, "running"), ("starting", True, "starting")],
        *[("running", False, "crashed"), ("starting", False, "crashed")],
        # Resumed, and has not written its state yet.
        ("finished", True, "running"),
    ],
)
def test_the_status_is_what_the_driver_said_unless_it_is_gone(tmp_path, said, held, status):
    run_dir = make_run(tmp_path, status=said)
    with (run_dir / "driver.lock").open() as lock:
        if held:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunFolder(run_dir).status == status


@pytest.mark.parametrize(
    ("steps", "left", "log", "status"),
    [
        (20, "stopped", "", "finished"),
        (10, "stopped", "", "stopped"),
        (10, "running", "", "crashed"),
        (10, "running", "starting Ray\nINFO: Run failed: OutOfMemory", "failed"),
        (10, "running", "starting Ray\nINFO: Run failed: OutOfMemory\nstarting Ray", "crashed"),
    ],
)
def test_the_status_of_an_older_run_is_told_by_what_it_left(tmp_path, steps, left, log, status):
    run_dir = make_run(tmp_path, steps=steps, status=left, older=True)
    (run_dir / "logs" / "controller.log").write_text(log)
    assert RunFolder(run_dir).status == status


def test_a_driver_that_writes_no_state_any_more_is_called_silent(tmp_path):
    run_dir = make_run(tmp_path, status="running")
    state = RunFolder(run_dir).state
    write_state(run_dir, structs.replace(state, host=socket.gethostname()))
    end = state.time
    with (run_dir / "driver.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunFolder(run_dir, clock=lambda: end + 5).silent_seconds is None
        assert RunFolder(run_dir, clock=lambda: end + 60).silent_seconds == 60


@pytest.mark.parametrize("ahead", [-3600.0, -20.0, 20.0, 3600.0])
def test_a_clock_of_another_machine_that_is_wrong_makes_no_run_silent_and_hides_no_hang(tmp_path, ahead):
    """Its state then counts from when it was first read here."""
    run_dir = make_run(tmp_path, status="running")
    state = structs.replace(RunFolder(run_dir).state, host="elsewhere")
    clock = Clock()
    clock.now = state.time

    def written():
        write_state(run_dir, structs.replace(state, time=clock.now + ahead))

    written()
    with (run_dir / "driver.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = RunFolder(run_dir, clock=lambda: clock.now)
        for _ in range(20):
            assert run.silent_seconds is None and run.status == "running"
            clock.now += 2
            written()
            run.refresh()
        for _ in range(10):
            clock.now += 2
            run.refresh()
        assert run.silent_seconds == 20


def test_prompts_of_an_ended_run_are_counted_in_its_ledger_without_touching_it(tmp_path):
    run_dir, held = make_run(tmp_path), made_buffer(20)
    (run_dir / "state.json").unlink()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run_dir.iterdir())
    balance = RunFolder(run_dir).balance
    assert (balance.admitted, balance.trained, balance.live) == (held.admitted, held.trained, held.live)
    assert balance.dropped == held.dropped and balance.lost == 0 and balance.source == "ledger.db"
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run_dir.iterdir()) == before


def test_prompts_of_a_live_run_are_those_of_its_state_or_its_metrics(tmp_path):
    run_dir = make_run(tmp_path, status="running")
    with (run_dir / "driver.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with_state = RunFolder(run_dir).balance
        (run_dir / "state.json").unlink()
        without = RunFolder(run_dir).balance
    assert with_state.source == "state.json" and without.source == "metrics.jsonl"
    assert with_state.dropped == without.dropped == made_buffer(20).dropped and without.lost == 0


def test_a_prompt_that_a_ledger_lost_is_counted(tmp_path):
    run_dir = make_run(tmp_path, status="failed")
    with sqlite3.connect(run_dir / "ledger.db") as database:
        database.execute("UPDATE groups SET state = 'unheard of' WHERE number = 3")
    assert RunFolder(run_dir).balance.lost == 1


def test_the_duration_of_a_run_counts_its_start(tmp_path):
    run = RunFolder(make_run(tmp_path, steps=10))
    assert run.start > BEGIN and run.seconds == pytest.approx(run.end - BEGIN)


def test_a_resumed_run_does_not_count_the_time_between_its_drivers(tmp_path):
    run_dir = make_run(tmp_path, steps=10)
    alone = RunFolder(run_dir).seconds
    events = EventLog(run_dir, clock=Clock(BEGIN + 100_000))
    events.write(START, "starting Ray")
    events.close()
    log = MetricsLog(run_dir, tensorboard=False, clock=Clock(BEGIN + 100_000 + STEP_SECONDS))
    log.log(11, {"version": 11})
    log.close()
    assert RunFolder(run_dir).seconds == pytest.approx(alone + STEP_SECONDS)


DAMAGE = {
    "config.yaml": "{{ not: yaml",
    "metrics.jsonl": "not json\n[1]\n" + row(1) + '{"step": "x", "time": 1}\n{"torn',
    "samples.jsonl": '{"step": 1}\n\x00\n',
    "events.jsonl": "3\n{}\n",
    "state.json": '{"time"',
    "ledger.db": "not a database",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path, name):
    run_dir = make_run(tmp_path)
    (run_dir / name).write_text(DAMAGE[name])
    run = RunFolder(run_dir)
    assert run.balance is not None or name == "metrics.jsonl"
    assert any(name in sentence for sentence in run.missing), run.missing
    assert name == "metrics.jsonl" or run.step == 20


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(tmp_path):
    run_dir = make_run(tmp_path)
    (run_dir / "metrics.jsonl").chmod(0)
    assert any("Permission denied" in sentence for sentence in RunFolder(run_dir).missing)


def test_a_configuration_of_another_version_is_kept_as_it_is(tmp_path):
    run_dir = make_run(tmp_path)
    append(run_dir / "config.yaml", "future:\n  knob: 3\n")
    run = RunFolder(run_dir)
    assert run.settings["future.knob"] == 3 and run.pacing.capacity == 8 and run.missing == []


def test_a_run_that_has_only_begun_is_shown(tmp_path):
    run_dir = make_run(tmp_path, steps=0)
    for name in ("metrics.jsonl", "samples.jsonl", "ledger.db", "events.jsonl", "state.json"):
        (run_dir / name).unlink()
    with (run_dir / "driver.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = RunFolder(run_dir)
        assert (run.status, run.step, run.start, run.seconds, run.balance) == ("starting", 0, None, None, None)
        assert run.missing == []


def test_a_run_without_measurements_has_run_since_its_start_event(tmp_path):
    run_dir = make_run(tmp_path, steps=0, status="starting")
    (run_dir / "metrics.jsonl").unlink()
    with (run_dir / "driver.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunFolder(run_dir, clock=lambda: BEGIN + 30).seconds == 30


def test_runs_are_found_by_their_directory_or_their_folder(tmp_path):
    first, second = make_run(tmp_path, "a", steps=1), make_run(tmp_path, "b", steps=1)
    (tmp_path / "notes").mkdir()
    assert find_runs(first) == [first] and find_runs(tmp_path) == [first, second]
    shutil.rmtree(second)
    assert find_runs(tmp_path) == [first]


@pytest.mark.parametrize("what", ["nothing", "file"])
def test_a_path_that_holds_no_runs_is_refused(tmp_path, what):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=what):
        find_runs(tmp_path / what)
