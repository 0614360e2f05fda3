"""The observer turns reports into files and a snapshot, and never ends a run."""

import asyncio
import logging
import os
from contextlib import nullcontext
from io import StringIO

import pytest
from passing_time import Clock
from rich.console import Console
from waits import until

from megasync.config import load_config
from megasync.errors import ServerError
from megasync.observe import names
from megasync.observe import observer as observer_module
from megasync.observe.curve import CURVE_FILE, held_out_name, plot_curve
from megasync.observe.display import view
from megasync.observe.events import EVENTS_FILE, read_events
from megasync.observe.metrics import METRICS_FILE, MetricsLog, read_metrics
from megasync.observe.observer import SPEED_STEPS, RunObserver, RunParts
from megasync.observe.registry import metric_of
from megasync.observe.samples import SAMPLES_FILE, answers_table, append_answers, before_and_after, read_answers
from megasync.observe.state_file import STATE_FILE, ModelState, ProcessState, RankState, TenantState, read_state
from megasync.watch.event_reader import EventReader
from megasync.watch.faults import faults

METRICS = {
    names.REWARD: 0.5,
    names.TRAINED_TOKENS: 100.0,
    names.SAMPLED_RATE: 70.0,
    names.STALENESS_MEAN: 0.25,
    names.STALENESS_MAX: 1.0,
}


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def observer(tmp_path, clock):
    config = load_config(
        {"model": {"path": "m"}, "data": {"train": {"kind": "digits", "source": "copy"}}},
        ["observe.tensorboard=false", "observe.samples=2", "name=test", "schedule.groups_per_step=4"],
    )
    return RunObserver(config, tmp_path, console=Console(file=StringIO()), clock=clock)


def test_steps_repeated_after_a_rewind_replace_earlier_metrics(observer, clock, tmp_path):
    with observer:
        for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3)):
            clock.now += 10
            observer.step(step, step, METRICS | {names.REWARD: reward})
        observer.evaluation(1, 1, {names.SCORE: 0.5})
        observer.evaluation(3, 3, {names.SCORE: 0.7})
        observer.rewind(1)
        snapshot = observer.snapshot()
        assert (snapshot.step, snapshot.rewards, snapshot.scores) == (1, (0.1,), ((1, 0.5),))
        observer.step(2, 5, METRICS | {names.REWARD: 0.9})
    columns = read_metrics(tmp_path)
    rewards = [
        (step, reward)
        for step, reward in zip(columns["step"], columns[names.REWARD], strict=True)
        if reward is not None
    ]
    assert rewards == [(1, 0.1), (2, 0.9)]
    assert columns[names.SCORE].count(0.7) == 0


def test_a_step_updates_the_snapshot_and_the_metrics_file(observer, clock, tmp_path):
    with observer:
        clock.now += 60  # starting up
        observer.step(1, 1, METRICS)
        clock.now += 5
        observer.step(2, 2, {**METRICS, "buffer/generating": 3.0, "buffer/finished": 2.0})
    snap = observer.snapshot()
    assert (snap.step, snap.version, snap.seconds, snap.step_seconds) == (2, 2, 65.0, 5.0)
    assert snap.rewards == (0.5, 0.5) and snap.trained_rate == 20.0 and snap.sampled_rate == 70.0
    assert (snap.staleness_mean, snap.staleness_max, snap.staleness_limit) == (0.25, 1.0, 2)
    assert snap.buffer == {"generating": 3, "finished": 2} and snap.capacity == 8
    assert snap.eta_seconds == 98 * 5.0
    columns = read_metrics(tmp_path)
    assert columns[names.TRAINED_RATE] == [None, 20.0] and columns["version"] == [1, 2]


def test_step_time_and_token_rate_are_measured_over_the_latest_steps(observer, clock):
    for step in range(1, 2 * SPEED_STEPS):
        clock.now += 10 if step < SPEED_STEPS else 1
        observer.step(step, step, METRICS)
    assert observer.snapshot().step_seconds == 1.0
    assert observer.snapshot().trained_rate == 100.0


def test_an_activity_lasts_until_the_next_one(observer, clock):
    observer.activity("trainer", "training")
    clock.now += 3
    observer.activity("trainer", "training")
    observer.activity("servers", "paused")
    clock.now += 1
    activities = {activity.part: (activity.doing, activity.seconds) for activity in observer.snapshot().activities}
    assert activities == {"trainer": ("training", 4.0), "servers": ("paused", 1.0)}


def test_an_evaluation_may_refer_to_an_earlier_step(observer, tmp_path):
    observer.step(5, 5, METRICS)
    observer.evaluation(4, 4, {names.SCORE: 0.75, f"{names.HELD_OUT_PREFIX}0": 0.75})
    snap = observer.snapshot()
    assert snap.step == 5 and snap.scores == ((4, 0.75),)
    assert any("0.750" in message for message in snap.messages)
    assert read_metrics(tmp_path)[names.SCORE] == [None, 0.75]


def test_only_the_latest_messages_are_kept(observer):
    for number in range(9):
        observer.message(f"message {number}")
    assert observer.snapshot().messages[-1] == "message 8" and len(observer.snapshot().messages) < 9


def test_a_failed_write_is_reported_once_and_training_continues(observer, tmp_path, caplog):
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            observer.step(step, step, METRICS)
    (warning,) = caplog.records
    assert f"could not write metrics in {tmp_path}: OSError: [Errno 28] No space left" in warning.getMessage()
    assert not warning.exc_info
    assert observer.snapshot().step == 3


def test_an_observer_bug_is_logged_with_its_traceback_and_training_continues(observer, monkeypatch, caplog):
    monkeypatch.delattr(MetricsLog, "_open")
    with caplog.at_level(logging.WARNING):
        observer.step(1, 1, METRICS)
    assert "AttributeError" in caplog.text and "Traceback" in caplog.text


def test_an_error_in_the_run_propagates_through_the_observer_which_draws_the_curve(observer, tmp_path):
    with pytest.raises(RuntimeError, match="server"), observer:
        observer.step(1, 1, METRICS)
        raise RuntimeError("a server died")
    assert (tmp_path / CURVE_FILE).read_bytes().startswith(b"\x89PNG")


# Curve


def test_the_curve_is_plotted_from_sparse_metrics(tmp_path):
    metrics = MetricsLog(tmp_path, tensorboard=False)
    metrics.log(1, {names.REWARD: float("nan")})
    metrics.log(2, {"eval/score@0": 0.5, "eval/score@1": 0.25})
    metrics.close()
    assert plot_curve(tmp_path, "sparse") == tmp_path / CURVE_FILE


# Samples


def test_only_the_configured_number_of_samples_is_saved(observer, tmp_path):
    observer.answers(0, 0, [(f"p{n}", "t", 0.0) for n in range(5)])
    observer.evaluation(0, 0, {"eval/score": 0.0})
    assert [answer.prompt for answer in read_answers(tmp_path)] == ["p0", "p1"]


def test_a_snapshot_in_another_thread_stands_whatever_changes_meanwhile(observer, monkeypatch):
    observer.activity("trainer", "training")
    for step in (1, 2, 3):
        observer.step(step, step, {})
    made = observer_module.Activity

    def while_it_changes(*fields):
        observer.activity(f"part {len(observer._activities)}", "something new")
        observer.rewind(0)
        return made(*fields)

    monkeypatch.setattr(observer_module, "Activity", while_it_changes)
    monkeypatch.setattr(observer_module, "_rate", lambda progress: observer.rewind(0) or len(progress))
    snapshot = observer.snapshot()
    assert [activity.part for activity in snapshot.activities] == ["trainer"] and snapshot.trained_rate == 3


def test_answers_of_an_evaluation_without_a_score_are_not_saved(observer, tmp_path):
    observer.answers(2, 2, [("p", "by weights that are gone", 1.0)])
    observer.answers(2, 5, [("p", "t", 0.0)])
    observer.evaluation(2, 5, {"eval/score": 0.0})
    observer.evaluation(4, 6, {"eval/score": 0.0})
    assert [(answer.version, answer.text) for answer in read_answers(tmp_path)] == [(5, "t")]


def test_a_truncated_sample_is_dropped_and_the_next_one_is_written_intact(tmp_path):
    append_answers(tmp_path, 0, 0, [("p\u2028q", "ü", 0.0)])
    complete_lines = (tmp_path / SAMPLES_FILE).read_bytes()
    (tmp_path / SAMPLES_FILE).write_bytes(complete_lines + complete_lines[: complete_lines.index("ü".encode()) + 1])
    assert [answer.step for answer in read_answers(tmp_path)] == [0]
    append_answers(tmp_path, 4, 4, [("p\u2028q", "v", 1.0)])
    assert [(answer.step, answer.prompt) for answer in read_answers(tmp_path)] == [(0, "p\u2028q"), (4, "p\u2028q")]


def test_the_first_and_last_responses_to_a_prompt_are_paired(tmp_path):
    append_answers(tmp_path, 0, 0, [("a", "early", 0.0), ("only once", "x", None)])
    append_answers(tmp_path, 5, 5, [("a", "middle", 0.5)])
    append_answers(tmp_path, 9, 9, [("a", "late", 1.0)])
    ((before, after),) = before_and_after(read_answers(tmp_path))
    assert (before.text, after.text, before.step, after.step) == ("early", "late", 0, 9)


def test_the_samples_table_escapes_markup_and_control_sequences(tmp_path):
    append_answers(tmp_path, 0, 0, [("[bold]p", "\x1b[2Jcleared", 0.0), ("ünï", "x" * 1000, None)])
    append_answers(tmp_path, 3, 3, [("[bold]p", "fine\nlines", 1.0), ("ünï", "y", 0.5)])
    text = StringIO()
    Console(file=text, width=100).print(answers_table(before_and_after(read_answers(tmp_path))))
    shown = text.getvalue()
    assert "[bold]p" in shown and "\x1b" not in shown and "ünï" in shown and "1.00" in shown
    assert shown.count("x") < 1000


def test_named_held_out_sets_are_shown_next_to_the_main_score(observer, tmp_path):
    with observer:
        observer.evaluation(
            0, 0, {names.SCORE: 0.5, "eval/hard/score": 0.25, "eval/hard/score@0": 0.25, "eval/seconds": 3.0}
        )
        snapshot = observer.snapshot()
    assert snapshot.set_scores == {"hard": 0.25}
    assert snapshot.messages[-1] == "held-out score 0.500, hard 0.250 after step 0 (version 0)"
    console = Console(file=StringIO(), width=100)
    console.print(view(snapshot))
    assert "hard" in console.file.getvalue() and "0.250" in console.file.getvalue()


def test_the_curve_has_one_line_per_held_out_set_and_temperature():
    keys = ["eval/score", "eval/score@0.6", "eval/hard/score", "eval/hard/score@1", "eval/hard/reward@1", "eval/failed"]
    assert {key: name for key in keys if (name := held_out_name(key))} == {
        "eval/score@0.6": "held-out, temperature 0.6",
        "eval/hard/score@1": "hard, temperature 1",
    }


# Events and the state


COUNTS = {"slots": {"finished": 1}, "capacity": 8, "admitted": 3, "trained": 2, "dropped": {}, "live": 1}


def kinds(run_dir):
    return [(event.kind, event.what) for event in EventReader(run_dir).update()]


def test_a_run_records_its_start_its_faults_and_its_end(observer, tmp_path):
    with observer, observer.running():
        observer.fault("rank 1", "killed")
        observer.recovery("rank 1", "restarted")
        observer.step(1, 1, METRICS)
        observer.step(2, 2, METRICS)
        observer.published(2, 2, {"sync/bytes": 10.0})
        observer.checkpoint(2, tmp_path / "checkpoints")
        observer.evaluation(2, 2, {names.SCORE: 0.5})
        observer.message("note")
    assert kinds(tmp_path) == [
        ("start", ""),
        ("fault", "rank 1"),
        ("recovery", "rank 1"),
        ("recovery", "training"),
        *((kind, "") for kind in ("sync", "checkpoint", "evaluation", "message", "end")),
    ]
    assert read_state(tmp_path).status == "finished"


@pytest.mark.parametrize(("error", "status"), [(ServerError("no server is left"), "failed"), (None, "stopped")])
def test_a_run_that_ends_early_records_why(observer, tmp_path, error, status):
    with pytest.raises(ServerError) if error else nullcontext(), observer, observer.running():
        observer.stopped, observer.finished = "no server is left", False
        if error:
            raise error
    end, state = read_events(tmp_path)[-1], read_state(tmp_path)
    assert (end.kind, end.fields["status"], state.status) == ("end", status, status)
    assert "no server is left" in end.text and "no server is left" in state.reason


def another_driver(observer):
    return RunObserver(observer._config, observer._run_dir, console=Console(file=StringIO()))


def test_a_resumed_run_records_the_death_of_the_driver_before_it(observer, tmp_path):
    observer.__enter__()
    observer.running().__enter__()
    died = read_state(tmp_path).time
    # Of a killed driver nothing is left but its files.
    observer._display.__exit__()
    with another_driver(observer) as resumed:
        assert [event.what for event in read_events(tmp_path) if event.kind == "fault"] == ["driver"]
        assert read_events(tmp_path)[-1].kind == "start"
        with resumed.running():
            resumed.step(1, 1, METRICS)
    (fault,) = faults(read_events(tmp_path))
    assert fault.time >= died - 0.01 and fault.recovered is not None and fault.seconds_to_next_step is not None
    assert str(os.getpid()) in fault.text


def test_a_resumed_run_that_had_ended_records_no_fault(observer, tmp_path):
    with observer:
        pass
    with another_driver(observer):
        pass
    assert kinds(tmp_path) == [("start", ""), ("end", ""), ("start", ""), ("end", "")]


async def test_the_state_has_what_the_parts_report(observer, tmp_path, monkeypatch):
    monkeypatch.setattr(observer_module, "STATE_SECONDS", 0.01)
    reported = [
        ProcessState(name="server-0", state="healthy"),
        ProcessState(name="server-1", state="dead", reason="killed"),
    ]
    observer.parts.servers = lambda: list(reported)
    observer.parts.ranks = lambda: [RankState(rank=0, pid=1)]
    with observer:
        async with observer.writing_state():
            assert read_state(tmp_path).status == "starting"
            with observer.running():
                observer.step(3, 2, METRICS)
                observer.activity("trainer", "training")
                observer.buffer(COUNTS, {"lease": "groups"})
                while (state := read_state(tmp_path)).status != "running":
                    await asyncio.sleep(0.01)
            # The parts are shut down before the last state is written.
            observer.step(4, 2, METRICS)
            reported.clear()
    assert read_state(tmp_path).servers == state.servers and read_state(tmp_path).step == 4
    assert (state.step, state.version, state.ranks) == (3, 2, [RankState(rank=0, pid=1)])
    assert [(server.name, server.version) for server in state.servers] == [("server-0", 2), ("server-1", None)]
    assert state.buffer.waiting == {"lease": "groups"} and state.activities["trainer"][0] == "training"
    assert abs(state.activities["trainer"][1] - state.time) < 60, "activities begin in seconds since the epoch"


async def test_a_part_that_cannot_be_described_does_not_end_the_run(observer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(observer_module, "STATE_SECONDS", 0.01)
    observer.parts.servers = lambda: 1 / 0
    with observer:
        async with observer.writing_state():
            with observer.running():
                await until(lambda: "ZeroDivisionError" in caplog.text)
    assert kinds(tmp_path)[-1] == ("end", "")


def test_events_that_cannot_be_written_do_not_end_the_run(observer, tmp_path, caplog):
    (tmp_path / EVENTS_FILE).mkdir()
    (tmp_path / STATE_FILE).mkdir()
    with observer:
        observer.fault("server-0", "killed")
        observer.step(1, 1, METRICS)
    assert "could not write events" in caplog.text and "could not write the state" in caplog.text


def test_what_tenants_of_a_service_do_is_in_the_state_the_view_and_the_metrics(tmp_path):
    config = load_config({"model": {"path": "m"}, "serve": {}}, ["observe.live=false", "observe.tensorboard=false"])
    alone = TenantState(name="lab", models=[ModelState(name="a"), ModelState(name="b")], steps=5, tokens=70)
    text = StringIO()
    with RunObserver(config, tmp_path, console=Console(file=text, width=110)) as observer:
        observer.show(RunParts(tenants=lambda: [alone]))
        observer.tenants()
        snapshot, state = observer.snapshot(), observer.state()
    assert state.tenants == [alone] and state.step == 5 and state.total_steps == snapshot.total_steps == 0
    Console(file=text, width=110).print(view(snapshot))
    assert "lab" in text.getvalue() and "buffer" not in text.getvalue()
    metrics = read_metrics(tmp_path)
    assert metrics["step"] == [5] and metrics["tenant/lab/tokens"] == [70] and metrics["tenant/lab/models"] == [2]
    assert "tenant/lab/loss" not in metrics
    assert all(metric_of(name) for name in metrics if "/" in name)
