"""A run that samples from a few likely tokens, and trains the distribution that it sampled from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

SAMPLING = {"max_new_tokens": 6, "top_k": 4, "top_p": 0.9}


@pytest.fixture
def config(miniature) -> Path:
    return miniature(
        schedule={"total_steps": 4, "groups_per_step": 4, "samples_per_group": 4, "max_staleness": 0},
        # Pieces of two tokens, so that a response's supports come in several.
        rollout={"servers": 1, "deterministic": True, "sampling": SAMPLING, "stream_interval": 2},
        trainer={"tensor_parallel": 2, "optimizer": {"lr": 1.0e-2}},
        checkpoint={"every_steps": 2, "export": False},
        data={"eval": None},
        eval=None,
    )


def steps_of(run_dir: Path) -> dict[int, dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "time/step" in row}


def check_scores(steps: dict[int, dict]) -> None:
    for row in steps.values():
        # Over all tokens they would differ by 1.
        assert row["train/logprob_diff"] < 1e-4
        assert row["train/entropy"] < 1.4  # that of four tokens is at most log 4


def test_the_trainer_scores_what_the_server_sampled(config, launch, the_run_dir):
    run = launch("train", config)
    assert run.wait() == 0, run.output
    steps = steps_of(the_run_dir())
    assert sorted(steps) == [1, 2, 3, 4]
    check_scores(steps)


@pytest.mark.matrix
def test_a_killed_run_repeats_the_one_that_was_not(config, launch, the_run_dir, tmp_path):
    """In the standard tier, `tests/buffer/test_payload.py` keeps and restores what could be sampled."""
    whole = launch("train", config)
    assert whole.wait() == 0, whole.output
    expected = steps_of(the_run_dir())
    check_scores(expected)
    shutil.move(the_run_dir(), tmp_path / "whole")
    run = launch("train", config)
    run.wait_for("step 3/")
    run.process.kill()
    run.wait()
    run.kill_everything()
    resumed = launch("resume", the_run_dir())
    assert resumed.wait() == 0, resumed.output
    found = steps_of(the_run_dir())
    for step, row in expected.items():
        assert found[step]["train/loss"] == pytest.approx(row["train/loss"], abs=1e-5), step


@pytest.mark.matrix
def test_a_smallest_probability_truncates_too(config, launch, the_run_dir):
    settings = ["rollout.deterministic=false", "rollout.sampling.min_p=0.3", "schedule.total_steps=2"]
    # With the bonus every response is scored, also those of a group with equal rewards.
    run = launch("train", config, *settings, "algorithm.entropy_coef=0.001")
    assert run.wait() == 0, run.output
    steps = steps_of(the_run_dir())
    assert len(steps) == 2
    assert all(row["train/logprob_diff"] < 1e-4 for row in steps.values())
