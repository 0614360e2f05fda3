"""`megasync sft` as a user runs it: killed, resumed, its export served."""

from __future__ import annotations

import signal

import pytest
from run_metrics import rows_of

pytestmark = pytest.mark.real

ROWS = {"kind": "digits", "source": "increment", "options": {"length": 2}}
SFT = {"train": ROWS, "validation": ROWS | {"split": "test"}, "rows_per_step": 16, "validate_every_steps": 20}


def losses(run_dir):
    """(step, value) of both losses; of a step that was trained again, the later value."""
    rows = rows_of(run_dir)
    return {
        key: {row["step"]: row[key] for row in rows if row.get(key) is not None}
        for key in ("sft/loss", "sft/validation_loss")
    }


@pytest.mark.matrix
def test_a_run_whose_rank_and_driver_were_killed_computes_the_losses_of_one_that_was_not(
    miniature, launch, tmp_path
) -> None:
    base = {"data": None, "eval": None, "rollout": None, "trainer": {"tensor_parallel": 1}}
    config = miniature(**base, sft=SFT | {"epochs": 40}, checkpoint={"every_steps": 20, "export_every": 60, "keep": 1})
    whole = launch("sft", config, "name=whole")
    assert whole.wait() == 0, whole.output
    assert "validation loss" in whole.output
    killed = launch("sft", config, "name=killed")
    killed.wait_for("step 30/")
    for rank in killed.find("TrainerRank"):
        rank.kill()
    killed.wait_for("training goes on after step")
    killed.wait_for("step 50/")
    killed.die()
    runs = {path.name.split("-")[0]: path for path in (tmp_path / "runs").iterdir()}
    refused = launch("resume", runs["killed"], "sft.rows_per_step=8")
    assert refused.wait() == 2, refused.output
    assert "the rows of sft.train are not those that the run was started with" in " ".join(refused.output.split())
    resumed = launch("resume", runs["killed"])
    assert resumed.wait() == 0, resumed.output
    one, other = losses(runs["whole"]), losses(runs["killed"])
    steps = sorted(one["sft/loss"])
    assert steps == list(range(1, len(steps) + 1)) and len(steps) == 240
    assert other["sft/loss"] == pytest.approx(one["sft/loss"], abs=1e-6)
    for step, loss in one["sft/validation_loss"].items():
        assert other["sft/validation_loss"][step] == pytest.approx(loss, abs=1e-6)
    assert one["sft/loss"][steps[-1]] < one["sft/loss"][1] - 0.1
    assert (runs["killed"] / "export" / "model.safetensors").is_file()
    exported = {path.name: path / "model.safetensors" for path in (runs["whole"] / "exports").iterdir()}
    assert sorted(exported) == [f"step-{step:08d}" for step in (60, 120, 180, 240)]
    assert exported["step-00000240"].read_bytes() == (runs["whole"] / "export" / "model.safetensors").read_bytes()
    # Reinforcement learning goes on from it: trainer and servers agree on its weights.
    trained = launch("train", miniature(schedule={"total_steps": 1}, rollout={"servers": 1}), "name=rl", model_of(runs))
    trained.wait_for("step 1/")
    assert trained.wait() == 0, trained.output


def model_of(runs) -> str:
    return f"model.path={runs['killed'] / 'export'}"


def test_an_interrupt_saves_and_leaves_nothing_running(miniature, launch, the_run_dir) -> None:
    run = launch("sft", miniature(sft=SFT | {"epochs": 10_000}))
    run.wait_for("step 3/")
    run.ends_cleanly(signal.SIGINT, the_run_dir())


@pytest.mark.matrix
def test_a_second_signal_ends_the_run_at_once_and_says_how_to_resume(miniature, launch, the_run_dir) -> None:
    run = launch("sft", miniature(sft=SFT | {"epochs": 10_000}, checkpoint={"every_steps": 1}))
    run.wait_for("step-00000002")
    run.signal(signal.SIGTERM)
    run.wait_for("stopping: SIGTERM")
    run.signal(signal.SIGINT)
    assert run.wait() in (0, 130), run.output
    assert f"to resume: megasync resume {the_run_dir()}" in " ".join(run.output.split())
    assert run.survivors() == []


@pytest.mark.matrix
def test_a_sigterm_during_the_last_export_leaves_no_part_of_it(miniature, launch, the_run_dir) -> None:
    run = launch("sft", miniature(sft=SFT | {"epochs": 1}))
    run.wait_for("exporting")
    run.signal(signal.SIGTERM)
    assert run.wait() in (0, 130), run.output
    assert list(the_run_dir().glob(".export*")) == []
    assert run.survivors() == []
