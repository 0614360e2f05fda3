"""A policy that learns from a critic and a teacher at the same time, and from several teachers."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_metrics import steps_of

from megasync.models.digits import write_digits

pytestmark = pytest.mark.real

STEPS = 4


SERVERS = {"max_total_tokens": 4096, "max_running_requests": 16, "mem_fraction": 0.2}


def test_both_reach_the_loss_and_the_critic_is_saved(miniature, digits_model: Path, launch, the_run_dir):
    """The teacher is the policy as it was before training. `test_repeatability.py` kills such a run."""
    config = miniature(
        schedule={"total_steps": STEPS, "samples_per_group": 2, "max_staleness": 0},
        trainer={"tensor_parallel": 2, "optimizer": {"lr": 1.0e-2}},
        rollout={"servers": 1, "deterministic": True},
        algorithm={"advantage": "gae", "teacher_coef": 0.1, "kl_coef": 0.01, "kl_in": "reward", "kl_kind": "k1"},
        critic={"enabled": True, "optimizer": {"lr": 1.0e-2}},
        teachers={"before": {"path": str(digits_model), **SERVERS}},
        checkpoint={"every_steps": 2, "export": False},
        data={"eval": None},
        eval=None,
    )
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
def test_each_set_of_rows_has_its_own_teacher(miniature, digits_model: Path, launch, the_run_dir, tmp_path):
    """One teacher is the policy before training, the other has other weights."""
    write_digits(other := tmp_path / "other", seed=1)

    def teacher(path: Path, source: str) -> dict:
        return {"path": str(path), "sources": [source], **SERVERS}

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
