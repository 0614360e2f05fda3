"""An offline run of Weights & Biases, read back by wandb's own reader of its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.config import load_config
from megasync.integrations.trackers.wandb_sink import WandbSink
from megasync.observe.sinks import Answers, StepMetrics

pytest.importorskip("wandb")
pytestmark = pytest.mark.extra

READER = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]


@pytest.fixture(autouse=True)
def no_service_left(monkeypatch):
    """wandb's process serves all runs of this one, so it would outlive the test."""
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    yield
    import wandb

    wandb.teardown()


@pytest.fixture
def make_sink(tmp_path):
    def make(*overrides):
        config = load_config(
            {"model": {"path": "m"}, "data": {"train": {"kind": "digits", "source": "copy"}}},
            ["observe.wandb={mode: offline, project: trains, group: night, tags: [a, b]}", *overrides],
        )
        return WandbSink(config.observe.wandb, config, tmp_path)

    return make


def records(run_dir):
    """All records that the starts of a run have written, by kind, oldest start first."""
    found = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        read = subprocess.run([*READER, path], capture_output=True, text=True, check=True, timeout=120)
        for line in read.stdout.splitlines():
            record = json.loads(line)
            found.setdefault(record["type"], []).append(record.get(record["type"]))
    return found


def rows(found):
    """The metrics of each line, without what wandb adds."""
    items = [entry["item"] for entry in found["history"]]
    return [{key: value for key, value in item.items() if not key.startswith(("_", "samples"))} for item in items]


def test_a_run_is_read_back_with_its_configuration_metrics_and_answers(make_sink, tmp_path):
    sink = make_sink("schedule.total_steps=7")
    message = sink.open()
    sink.log(StepMetrics(1, 1000.0, {"train/loss": 0.5}))
    sink.log(StepMetrics(0, 1001.0, {"eval/score": 0.25}, evaluation=True))
    sink.answers(Answers(1, 1, [("2+2=", "4", 1.0), ("2+3=", "?", None)]))
    sink.close(failed=False)
    assert f"{tmp_path}/wandb/offline-run-" in message
    found = records(tmp_path)
    (run,) = found["run"]
    assert (run["project"], run["run_group"], run["tags"]) == ("trains", "night", ["a", "b"])
    assert rows(found)[:2] == [{"step": 1, "train/loss": 0.5}, {"step": 0, "eval/score": 0.25}]
    assert found["history"][0]["item"]["_timestamp"] == 1000.0
    # Every metric is drawn over the trained steps, not over the lines.
    assert {"glob_name": "*", "step_metric": "step"}.items() <= found["metric"][1].items()
    config = {key: value for update in found["config"] for key, value in update["update"].items()}
    assert config["schedule"]["total_steps"] == 7 and config["units"]["time/step"] == "s"
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    assert json.loads(table.read_text())["data"] == [[1, 1, "2+2=", "4", 1.0], [1, 1, "2+3=", "?", None]]


def test_a_resumed_run_is_the_same_run_and_keeps_what_was_trained_twice(make_sink, tmp_path):
    for steps, total in (((1, 2, 3), 4), ((3, 4), 5)):
        sink = make_sink(f"schedule.total_steps={total}")
        sink.open()
        for step in steps:
            sink.log(StepMetrics(step, 1000.0, {"train/loss": 1 / step}))
        sink.close(failed=False)
    found = records(tmp_path)
    assert len(found["run"]) == 2 and len({run["run_id"] for run in found["run"]}) == 1
    assert [row["step"] for row in rows(found)] == [1, 2, 3, 3, 4]


HANGS = """
import os, signal, sys
from pathlib import Path
import psutil
from megasync.config import load_config
from megasync.observe import sinks
from megasync.integrations.trackers.wandb_sink import SERVICE, WandbSink

config = load_config({"model": {"path": "m"}}, ["observe.wandb.mode=offline"])
sink = WandbSink(config.observe.wandb, config, Path(sys.argv[1]))
sinks.CLOSE_SECONDS = 0.5
all_sinks = sinks.Sinks([sink])
all_sinks.start()
while not all_sinks.messages():
    pass
(service,) = [child for child in psutil.Process().children() if child.name().startswith(SERVICE)]
os.kill(service.pid, signal.SIGSTOP)
all_sinks.close()
print("the run has ended")
"""


def test_a_process_of_wandb_that_hangs_does_not_keep_the_run_from_ending(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path], capture_output=True, text=True, check=True, timeout=300
    )
    assert ended.stdout == "the run has ended\n"
    assert "Weights & Biases: not finished in time" in ended.stderr
