"""Metrics are strict JSON, nothing is filled in, and a resumed run continues the same file."""

import json
import logging
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasync.observe.metrics import METRICS_FILE, TENSORBOARD_DIR, MetricsLog, read_metrics


def logged(run_dir, *lines, tensorboard=False):
    metrics = MetricsLog(run_dir, tensorboard, clock=lambda: 1000.0)
    for step, values in lines:
        metrics.log(step, values)
    metrics.close()


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_each_line_holds_exactly_the_logged_values_at_once_and_columns_have_none_for_gaps(tmp_path):
    metrics = MetricsLog(tmp_path, tensorboard=False, clock=lambda: 1000.0)
    metrics.log(1, {"a": 1.5})
    metrics.log(2, {"b": 2})
    lines = [strict(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines == [{"step": 1, "time": 1000.0, "a": 1.5}, {"step": 2, "time": 1000.0, "b": 2}]
    columns = read_metrics(tmp_path)
    assert columns["a"] == [1.5, None] and columns["b"] == [None, 2.0] and columns["step"] == [1, 2]
    metrics.close()


@settings(max_examples=30)
@given(st.floats())
def test_any_float_is_written_as_strict_json(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("run")
    logged(folder, (1, {"x": value}))
    written = strict((folder / METRICS_FILE).read_text())["x"]
    assert written == (value if math.isfinite(value) else None)


def test_numpy_scalars_are_written_as_numbers(tmp_path):
    logged(tmp_path, (1, {"x": np.float32(0.5), "y": np.int64(3), "z": np.float32("nan")}))
    assert strict((tmp_path / METRICS_FILE).read_text()) == {"step": 1, "time": 1000.0, "x": 0.5, "y": 3.0, "z": None}


def test_metrics_of_a_resumed_run_replace_those_of_repeated_steps(tmp_path):
    logged(tmp_path, (1, {"loss": 1.0}), (2, {"loss": 2.0}), (2, {"eval/score": 0.5}), (3, {"loss": 3.0}))
    logged(tmp_path, (2, {"loss": 20.0}), (3, {"loss": 30.0}))
    columns = read_metrics(tmp_path)
    assert columns["step"] == [1, 2, 2, 3]
    assert columns["loss"] == [1.0, None, 20.0, 30.0]
    assert columns["eval/score"] == [None, 0.5, None, None]


@pytest.mark.parametrize(
    "damaged",
    [
        '{"step": 1, "time": 17',
        "nonsense\n",
        "\0" * 100,
        "[1]\n",
        '{"a": 5}\n',
        '{"step": "x"}\n',
        "[" * 100_000 + "\n",
    ],
)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_damaged_line_costs_only_itself_however_often_a_run_is_resumed(tmp_path, caplog, damaged, place):
    path, whole = tmp_path / METRICS_FILE, [f'{{"step": {step}, "a": {step}}}\n' for step in (1, 2)]
    whole.insert({"first": 0, "middle": 1, "last": 2}[place], damaged)
    path.write_text("".join(whole))
    torn = not damaged.endswith("\n")
    # A line that follows a torn one is part of it.
    kept = [step for step in (1, 2) if not (torn and (place, step) in {("first", 1), ("middle", 2)})]
    for step in (3, 4, 5):
        logged(tmp_path, (step, {"a": step}))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == [row["a"] for row in found] == [*kept, 3, 4, 5]


def test_a_reader_says_how_many_lines_it_leaves_out(tmp_path, caplog):
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\nnonsense\n{"step": 2}\n{"st')
    with caplog.at_level(logging.WARNING):
        assert read_metrics(tmp_path)["step"] == [1, 2]
    assert "left out 2 damaged lines, the first is line 2" in caplog.text


def scalars(run_dir, key):
    events = EventAccumulator(str(run_dir / TENSORBOARD_DIR))
    events.Reload()
    return [(event.step, round(event.value, 3)) for event in events.Scalars(key)]


def test_tensorboard_receives_only_finite_values(tmp_path):
    logged(tmp_path, (1, {"a": 0.5, "b": math.nan}), (2, {"a": 0.25, "b": 1}), tensorboard=True)
    assert scalars(tmp_path, "a") == [(1, 0.5), (2, 0.25)]
    assert scalars(tmp_path, "b") == [(2, 1.0)]


def test_tensorboard_discards_the_steps_that_a_resumed_run_repeats(tmp_path):
    logged(tmp_path, (1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3}), tensorboard=True)
    logged(tmp_path, (2, {"a": 20}), tensorboard=True)
    assert scalars(tmp_path, "a") == [(1, 1.0), (2, 20.0)]
