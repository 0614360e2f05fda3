"""A run that samples from a few likely tokens, and trains the distribution that it sampled from."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_metrics import steps_of

pytestmark = pytest.mark.real

SAMPLING = {"max_new_tokens": 6, "top_k": 4, "top_p": 0.9}


@pytest.fixture
def config(miniature) -> Path:
    return miniature(
        schedule={"total_steps": 4, "max_staleness": 0},
        # Pieces of two tokens, so that a response's supports come in several.
        rollout={"servers": 1, "deterministic": True, "sampling": SAMPLING, "stream_interval": 2},
        trainer={"tensor_parallel": 2, "optimizer": {"lr": 1.0e-2}},
        checkpoint={"every_steps": 2, "export": False},
        data={"eval": None},
        eval=None,
    )


def check_scores(steps: list[dict]) -> None:
    for row in steps:
        # Over all tokens they would differ by 1.
        assert row["train/logprob_diff"] < 1e-4
        assert row["train/entropy"] < 1.4  # that of four tokens is at most log 4


def test_the_trainer_scores_what_the_server_sampled(config, launch, the_run_dir):
    run = launch("train", config)
    assert run.wait() == 0, run.output
    steps = steps_of(the_run_dir())
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    check_scores(steps)


@pytest.mark.matrix
def test_a_smallest_probability_truncates_too(config, launch, the_run_dir):
    settings = ["rollout.deterministic=false", "rollout.sampling.min_p=0.3", "schedule.total_steps=2"]
    # With the bonus every response is scored, also those of a group with equal rewards.
    run = launch("train", config, *settings, "algorithm.entropy_coef=0.001")
    assert run.wait() == 0, run.output
    steps = steps_of(the_run_dir())
    assert len(steps) == 2
    assert all(row["train/logprob_diff"] < 1e-4 for row in steps)
