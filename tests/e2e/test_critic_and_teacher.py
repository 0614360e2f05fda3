"""A policy that learns from a critic and a teacher at the same time; killed, it resumes with both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megasync.models.digits import write_digits

pytestmark = pytest.mark.real

STEPS = 4


@pytest.fixture
def config(miniature, digits_model: Path) -> Path:
    """The teacher is the policy as it was before training. Without staleness and with seeds, runs repeat."""
    return miniature(
        schedule={"total_steps": STEPS, "groups_per_step": 4, "samples_per_group": 2, "max_staleness": 0},
        trainer={"tensor_parallel": 2, "optimizer": {"lr": 1.0e-2}},
        rollout={"servers": 1, "deterministic": True},
        algorithm={"advantage": "gae", "teacher_coef": 0.1, "kl_coef": 0.01, "kl_in": "reward", "kl_kind": "k1"},
        critic={"enabled": True, "optimizer": {"lr": 1.0e-2}},
        teachers={
            "before": {
                "path": str(digits_model),
                "max_total_tokens": 4096,
                "max_running_requests": 16,
                "mem_fraction": 0.2,
            }
        },
        checkpoint={"every_steps": 2, "export": False},
        data={"eval": None},
        eval=None,
    )


def steps_of(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/step" in row]


def test_both_reach_the_loss_and_the_critic_is_saved(config, launch, the_run_dir):
    run = launch("train", config)
    assert run.wait() == 0, run.output
    first, *later = rows = steps_of(the_run_dir())
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # Token for token, the teacher's server computes what the trainer computes of the same weights.
    assert first["train/teacher_kl"] == pytest.approx(0.0, abs=1e-4)
    assert first["train/reward_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert all(row["train/teacher_kl"] != 0.0 for row in later)
    assert rows[-1]["teachers/before/requests"] == STEPS * 8
    assert all(row["critic/loss"] > 0 and row["critic/skipped"] == 0 for row in rows)
    assert len({row["critic/value_mean"] for row in rows}) == STEPS
    assert (the_run_dir() / "checkpoints" / "step-00000004" / "critic" / "COMPLETE").is_file()


@pytest.mark.matrix
def test_a_killed_run_repeats_the_one_that_was_not(config, launch, the_run_dir, tmp_path):
    whole = launch("train", config)
    assert whole.wait() == 0, whole.output
    expected = steps_of(the_run_dir())
    shutil.move(the_run_dir(), tmp_path / "whole")
    killed = launch("train", config)
    killed.wait_for("step 3/")
    killed.process.kill()
    killed.wait()
    killed.kill_everything()
    resumed = launch("resume", the_run_dir())
    assert resumed.wait() == 0, resumed.output
    found = {row["step"]: row for row in steps_of(the_run_dir())}
    for row in expected:
        for name in ("train/loss", "critic/loss", "train/teacher_kl"):
            assert found[row["step"]][name] == pytest.approx(row[name], abs=1e-5), (row["step"], name)
    refused = launch("resume", the_run_dir(), "critic.enabled=false", "algorithm.advantage=grpo")
    assert refused.wait() == 2, refused.output
    assert "critic.enabled=false cannot replace true" in " ".join(refused.output.split())


@pytest.mark.matrix
def test_each_set_of_rows_has_its_own_teacher(miniature, digits_model: Path, launch, the_run_dir, tmp_path):
    """One teacher is the policy before training, the other has other weights."""
    write_digits(other := tmp_path / "other", seed=1)

    def teacher(path: Path, source: str) -> dict:
        servers = {"max_total_tokens": 4096, "max_running_requests": 16, "mem_fraction": 0.2}
        return {"path": str(path), "sources": [source], **servers}

    def rows(source: str) -> dict:
        return {"data": {"kind": "digits", "source": source, "size": 64, "options": {"length": 3}}}

    config = miniature(
        data={"train": None, "eval": None, "sets": {"copy": rows("copy"), "increment": rows("increment")}},
        eval=None,
        schedule={"total_steps": 2, "groups_per_step": 4, "samples_per_group": 2, "max_staleness": 0},
        trainer={"tensor_parallel": 1, "optimizer": {"lr": 1.0e-9}},
        rollout={"servers": 1},
        algorithm={"teacher_coef": 0.1},
        teachers={"before": teacher(digits_model, "copy"), "another": teacher(other, "increment")},
        checkpoint={"export": False},
    )
    run = launch("train", config, "schedule.stop_at_score=null")
    assert run.wait() == 0, run.output
    rows_of_run = steps_of(the_run_dir())
    assert {rows_of_run[-1][f"teachers/{name}/requests"] for name in ("before", "another")} == {2 * 2 * 2}
    # The policy hardly changes, so the first teacher agrees with it, and only the second one counts.
    assert all(abs(row["train/teacher_kl"]) > 1e-3 for row in rows_of_run)
