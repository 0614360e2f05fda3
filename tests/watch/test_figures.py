"""Figures show the numbers of the metrics, and stay light however long a run is."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_runs import make_run

from megasync.watch import figures
from megasync.watch.run_folder import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFolder(make_run(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return RunFolder(make_run(tmp_path_factory.mktemp("runs"), "other", seed=1))


def trace_of(figure, name):
    (found,) = [trace for trace in figure.data if trace.name == name]
    return found


SINGLE = ("time_shares", "staleness_ages", "buffer_slots", "servers", "sync_phases", "layer_gradients", "layer_weights")
ALL = figures.COMPARABLE | {name: getattr(figures, name) for name in SINGLE}


@pytest.mark.parametrize("name", [name for name in ALL if name != "losses"])
def test_every_figure_names_the_unit_of_its_axis(run, name):
    figure = ALL[name](run)
    assert figure.layout.yaxis.title.text and figure.layout.title.text
    json.loads(figure.to_json())


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_measured_nothing_has_no_figures(tmp_path, name):
    assert ALL[name](RunFolder(tmp_path)) is None


def test_a_line_has_the_logged_numbers(run):
    line = trace_of(figures.lengths(run), "generated, mean")
    logged = run.series("rollout/response_length")
    assert line.x.tolist() == logged.steps.tolist() and line.y.tolist() == logged.values.tolist()


def test_the_trainers_time_adds_up_to_one(run):
    figure = figures.time_shares(run)
    assert {trace.name for trace in figure.data} == {"train", "wait for groups", "publish weights", "other"}
    assert np.sum([trace.y for trace in figure.data], axis=0) == pytest.approx(np.ones(20))


def test_the_bound_is_drawn_where_all_runs_share_it(run, other, tmp_path):
    assert "bound" in figures.staleness([run, other]).to_json()
    fresher = RunFolder(make_run(tmp_path, "fresher", settings=["schedule.max_staleness=0"]))
    assert "bound" not in figures.staleness([run, fresher]).to_json()


@pytest.mark.parametrize(
    ("x", "last"), [("step", 20), ("tokens", sum(320 + step for step in range(1, 21))), ("time", 40 / 60)]
)
def test_runs_are_aligned_by_steps_tokens_or_time(run, x, last):
    assert trace_of(figures.lengths(run, x), "generated, mean").x[-1] == pytest.approx(last)


@given(arrays(np.float64, st.integers(1, 400), elements=st.floats(-5, 5)), st.integers(1, 40))
def test_thinning_keeps_extremes_and_ends(values, buckets):
    kept = figures.thinned(np.arange(len(values)), values, buckets)
    assert {0, len(values) - 1} <= set(kept) and (np.diff(kept) > 0).all()
    assert values[kept].max() == values.max() and values[kept].min() == values.min()
    assert len(kept) <= max(2 * buckets, 1) + 2


def test_thinning_keeps_gaps():
    values = np.sin(np.arange(10_000) / 50)
    values[4321] = np.nan
    assert np.isnan(values[figures.thinned(np.arange(10_000), values)]).sum() == 1


@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(-5, 5)), st.integers(1, 20))
def test_a_moving_mean_is_the_mean_of_the_latest_values(values, width):
    expected = [values[max(0, end - width) : end].mean() for end in range(1, len(values) + 1)]
    assert figures.moving_mean(values, width) == pytest.approx(np.array(expected), abs=1e-9)


def test_figures_of_a_hundred_thousand_steps_stay_light(tmp_path):
    run_dir = make_run(tmp_path, steps=1)
    lines = [
        json.dumps({"step": s, "time": 1e9 + s, "train/reward": s % 7, "time/step": 1.0, "time/train": 0.5})
        for s in range(100_000)
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = RunFolder(run_dir)
    assert len(run.series("train/reward")) == 100_000
    assert len(figures.reward(run).to_json()) < 200_000
    assert len(figures.time_shares(run).to_json()) < 50_000


def test_names_of_runs_are_text(tmp_path):
    runs = [RunFolder(make_run(tmp_path, name, steps=2)) for name in ("<b>one", "two")]
    assert {trace.name for trace in figures.utilization(runs).data} == {"&lt;b&gt;one: utilization", "two: utilization"}
