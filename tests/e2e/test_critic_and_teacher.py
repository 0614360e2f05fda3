"""A policy that learns from a critic and a teacher at the same time, and from several teachers."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_metrics import steps_of

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
