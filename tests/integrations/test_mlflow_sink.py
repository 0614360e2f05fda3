"""A run in a folder of MLflow, read back by its own client."""

import pytest

from megasync.config import load_config
from megasync.integrations.trackers.mlflow_sink import MlflowSink, metric_name
from megasync.observe.registry import METRICS
from megasync.observe.sinks import StepMetrics


@pytest.fixture
def store(tmp_path):
    pytest.importorskip("mlflow")
    return (tmp_path / "store").as_uri()


@pytest.fixture
def make_sink(store, tmp_path):
    def make(*overrides):
        config = load_config(
            {"model": {"path": "m"}, "data": {"train": {"kind": "digits", "source": "copy"}}},
            [f"observe.mlflow={{tracking_uri: '{store}', experiment: nights, run_name: first}}", *overrides],
        )
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        return MlflowSink(config.observe.mlflow, config, run_dir)

    return make


def only_run(store):
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("nights").experiment_id])
    return client, run


@pytest.mark.extra
def test_a_run_is_read_back_with_its_parameters_and_metrics(make_sink, store, tmp_path):
    sink = make_sink("schedule.total_steps=7")
    sink.open()
    sink.log(StepMetrics(1, 1000.5, {"train/loss": 0.5, "rollout/reward/math": 1.0, "rollout/reward/math/none": 0.0}))
    sink.log(StepMetrics(0, 1001.0, {"eval/score@0.7": 0.25}, evaluation=True))
    sink.close(failed=False)
    client, run = only_run(store)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["schedule.total_steps"] == "7" and run.data.tags["run_dir"] == str(tmp_path / "run")
    assert run.data.metrics == {
        "train/loss": 0.5,
        "rollout/reward.math": 1.0,
        "rollout/reward.math.none": 0.0,
        "eval/score_at_0.7": 0.25,
    }
    (point,) = client.get_metric_history(run.info.run_id, "train/loss")
    assert (point.step, point.timestamp, point.value) == (1, 1000500, 0.5)


@pytest.mark.extra
def test_a_resumed_run_is_the_same_run_and_keeps_what_was_trained_twice(make_sink, store):
    for steps, total in (((1, 2, 3), 4), ((3, 4), 5)):
        sink = make_sink(f"schedule.total_steps={total}")
        sink.open()
        for step in steps:
            sink.log(StepMetrics(step, 1000.0 + total, {"train/loss": 1 / step}))
        sink.close(failed=total == 4)
    client, run = only_run(store)
    assert run.info.status == "FINISHED"
    assert (run.data.params["schedule.total_steps"], run.data.tags["resumed.schedule.total_steps"]) == ("4", "5")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 3, 4]


@pytest.mark.extra
def test_a_run_that_failed_is_marked_so(make_sink, store):
    sink = make_sink()
    sink.open()
    sink.close(failed=True)
    assert only_run(store)[1].info.status == "FAILED"


@pytest.mark.extra
def test_a_run_that_the_server_no_longer_has_is_created_again(make_sink, store, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mlflow-run-id").write_text("0" * 32)
    sink = make_sink()
    sink.open()
    sink.close(failed=False)
    assert only_run(store)[1].info.status == "FINISHED"


def test_names_fit_mlflow_and_stay_apart():
    names = [metric_name(metric.name.replace("<", "").replace(">", "")) for metric in METRICS]
    assert len(set(names)) == len(names)
    assert metric_name("eval/hard/score@0.7") == "eval/hard.score_at_0.7"
    assert metric_name("rollout/reward/package.module:f") == "rollout/reward.package.module_f"
