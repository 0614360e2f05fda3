"""A run from start to end on the real stack, and resumed from a checkpoint until a signal stops it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from fp8_folders import write_fp8
from run_metrics import rows_of, steps_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import megasync
from megasync.observe.registry import metric_of
from megasync.watch.html_page import render_html
from megasync.watch.recorded import Filters
from megasync.watch.report import make_report
from megasync.watch.run_folder import RunFolder
from megasync.watch.spans import TraceReader
from megasync.watch.timeline import Timeline

pytestmark = pytest.mark.real


def check_record(run_dir: Path, steps: list[dict]) -> None:
    """What the page, a report and the registry of metrics know of a finished run is what its metrics say."""
    logged = {name for row in rows_of(run_dir) for name in row} - {"step", "time"}
    of_workflows = metric_of("rollout/whatever a workflow reports")
    assert len(logged) > 90 and not {name for name in logged if metric_of(name) in (None, of_workflows)}

    run = RunFolder(run_dir)
    assert (run.status, run.step, run.missing, run.balance.lost) == ("finished", len(steps), [], 0)
    assert [server.state for server in run.state.servers] == ["healthy"] * 2 and not run.faults
    rewards = [row["train/reward"] for row in steps]
    assert run.series("train/reward").values.tolist() == rewards
    for step, reward in enumerate(rewards, 1):
        responses = run.rollouts.select(Filters(step=(step, step)))
        assert len(responses) == steps[step - 1]["train/sequences"]
        assert sum(row.reward for row in responses) / len(responses) == pytest.approx(reward)
    reported = render_html(make_report(run))
    assert f'value="{rewards[-1]!r}"' in reported and "<script src" not in reported

    timeline = Timeline()
    timeline.add(TraceReader(run_dir).update())
    assert [step.number for step in timeline.steps()] == [row["step"] for row in steps]
    for step in timeline.steps():
        assert sum(step.phases.values()) == pytest.approx(step.seconds) and step.phases["train"] > 0
    assert {"server-0", "server-1", "trainer-0", "trainer-1"} <= {row.process for row in timeline.picture(0, 2e9).rows}


@pytest.mark.standard
def test_a_run_trains_asynchronously_resumes_and_saves_on_one_signal(miniature, launch) -> None:
    config = miniature(checkpoint={"every_steps": 2, "keep": 2, "export_every": 4})
    result = megasync.AsyncTrainer(config).train()

    assert (result.step, result.version, result.stopped) == (4, 4, "")
    assert [step for step, _ in result.scores] == [0, 2, 4]
    steps = steps_of(result.run_dir)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert row["train/staleness_max"] <= 2, "max_staleness 1 plus a window slack of 1"
        assert row["groups/admitted"] == row["groups/trained"] + row["groups/dropped"] + row["groups/live"]
        assert row["sync/parity"] < 1e-4
    assert steps[-1]["groups/trained"] == 16
    check_record(result.run_dir, steps)
    assert (result.run_dir / "curve.png").stat().st_size > 10_000
    assert list((result.run_dir / "tensorboard").iterdir())
    assert {json.loads(line)["step"] for line in (result.run_dir / "samples.jsonl").read_text().splitlines()} >= {0, 4}

    exported = result.run_dir / "exports" / "step-00000004" / "model.safetensors"
    assert exported.read_bytes() == (result.export_dir / "model.safetensors").read_bytes()

    # The export is a Hugging Face model like any other, and not the one that the run began with.
    tokenizer = AutoTokenizer.from_pretrained(result.export_dir)
    model = AutoModelForCausalLM.from_pretrained(result.export_dir)
    before = AutoModelForCausalLM.from_pretrained(megasync.AsyncTrainer(config).config.model.path)
    ids = torch.tensor([tokenizer("=123=")["input_ids"]])
    assert not torch.equal(model(ids).logits, before(ids).logits)

    # On another topology: data-parallel ranks in the place of tensor-parallel ones, and one server.
    changes = [
        "schedule.total_steps=100000",
        "trainer.tensor_parallel=1",
        "trainer.data_parallel=2",
        "rollout.servers=1",
    ]
    run = launch("resume", str(result.run_dir), *changes)
    run.wait_for("step 6/")
    run.signal(signal.SIGUSR1)
    run.wait_for("State of the run")
    run.wait_for("x training: ")
    second = launch("resume", str(result.run_dir), *changes)
    assert second.wait() == 2, second.output
    assert f"is being run by process {run.process.pid} on " in " ".join(second.output.split())
    run.ends_cleanly(signal.SIGINT, result.run_dir)
    steps = steps_of(result.run_dir)
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 6
    assert steps[-1]["groups/trained"] == 4 * len(steps)


@pytest.mark.matrix
def test_a_run_begins_with_a_folder_in_block_fp8_and_ends_with_a_plain_one(
    miniature, digits_model: Path, tmp_path: Path
) -> None:
    fp8, plain = tmp_path / "fp8", tmp_path / "plain"
    write_fp8(digits_model, fp8, plain, (32, 32))
    result = megasync.AsyncTrainer(miniature(model={"path": str(fp8)}), ["schedule.total_steps=2"]).train()
    steps = steps_of(result.run_dir)
    assert [row["step"] for row in steps] == [1, 2] and max(row["sync/parity"] for row in steps) < 1e-4
    trained, dequantized = (load_file(folder / "model.safetensors") for folder in (result.export_dir, plain))
    assert trained.keys() == dequantized.keys()
    assert "quantization_config" not in json.loads((result.export_dir / "config.json").read_text())
    # Two steps of Adam away from what the folder held.
    moved = [(trained[name] - dequantized[name].float()).abs().max().item() for name in trained]
    assert 0 < max(moved) < 0.01
