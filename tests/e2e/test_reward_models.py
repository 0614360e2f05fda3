"""A run scored by a classifier beside the rollout server and by a judge in its own pool, then `megasync eval` of it.

The run has two held-out sets.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from run_metrics import rows_of
from tiny_models import make_tiny_classifier, make_tiny_model

pytestmark = pytest.mark.real

SMALL = {"max_total_tokens": 4096, "max_running_requests": 16, "mem_fraction": 0.3}


@pytest.fixture
def config(miniature, tmp_path: Path) -> Path:
    digits = {"kind": "digits", "source": "copy", "size": 16, "seed": 2, "options": {"length": 2}}
    return miniature(
        schedule={"total_steps": 2, "groups_per_step": 2, "samples_per_group": 3},
        trainer={"tensor_parallel": 1},
        rollout={
            "servers": 1,
            "workers": 2,
            "rewards": {
                "exact": {"function": "megasync.data.digits:digit_reward"},
                "grader": {"model": "grader", "weight": 0.1},
                "judge": {"model": "judge", "weight": 0.5},
            },
        },
        reward_models={
            "grader": {
                "kind": "classifier",
                "path": str(make_tiny_classifier(tmp_path / "grader")),
                "pool": "rollout",
                **SMALL,
            },
            "judge": {
                "kind": "generative",
                "path": str(make_tiny_model(tmp_path / "judge")),
                "read": "yes_no",
                "yes_token": "Y",
                "no_token": "N",
                "template": "{prompt}{completion}?",
                **SMALL,
            },
        },
        eval={
            "samples": 8,
            "sets": {
                "short": {
                    "data": digits,
                    "temperatures": [1.0],
                    "repeats": 2,
                    "reward": "megasync.data.digits:digit_reward",
                }
            },
        },
    )


def test_a_run_with_reward_models_and_the_evaluation_of_its_checkpoint(config, launch, the_run_dir, tmp_path):
    run = launch("train", config)
    assert run.wait() == 0, run.output
    run_dir = the_run_dir()
    rows = rows_of(run_dir)
    last = [row for row in rows if "time/step" in row][-1]
    for model in ("grader", "judge"):
        assert last[f"reward_models/{model}/servers"] == 1.0
        # Every response of the two steps, and the held-out set that the run's own rewards score.
        assert last[f"reward_models/{model}/requests"] >= 2 * 2 * 3 + 8
        assert (last[f"rollout/reward/{model}/none"], last[f"reward_models/{model}/retries"]) == (0.0, 0.0)
    assert 0.0 < last["rollout/reward/judge"] < 1.0
    combined = last["rollout/reward/exact"] + 0.1 * last["rollout/reward/grader"] + 0.5 * last["rollout/reward/judge"]
    assert last["rollout/reward_mean"] == pytest.approx(combined)
    evaluated = [row for row in rows if "eval/score" in row]
    assert [row["step"] for row in evaluated] == [0, 2]
    assert {"eval/score@0", "eval/short/score@1", "eval/short/pass2@1"} <= set(evaluated[-1])
    assert "short 0." in run.output

    out = tmp_path / "out"
    done = launch("eval", run_dir, "--out", out, "--set", "short")
    assert done.wait() == 0, done.output
    assert not list((out / "logs").glob("reward-*")), "the set has a reward of its own, so no reward model is needed"
    assert "pass@2" in done.output
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert sorted((a["number"], a["repeat"]) for a in answers) == [(n, r) for n in range(8) for r in range(2)]
    assert {(a["set"], a["temperature"], a["error"]) for a in answers} == {("short", 1.0, "")}
    scores = json.loads((out / "scores.json").read_text())
    assert scores["model"] == str(run_dir / "checkpoints" / "step-00000002")
    (score,) = scores["scores"]
    assert (score["n"], score["failed"], score["set"]) == (16, 0, "short")
    assert score["reward"] == pytest.approx(sum(a["reward"] for a in answers) / 16)
    assert not (out / "model").exists(), "weights that were written out for the servers"


def test_an_evaluation_ends_cleanly_on_ctrl_c(miniature, digits_model, launch, tmp_path):
    endless = ["eval.temperatures=[1.0]", "eval.repeats=10000", "rollout.servers=1"]
    run = launch("eval", miniature(), "--model", digits_model, "--out", tmp_path / "out", *endless)
    answers = tmp_path / "out" / "answers.jsonl"
    run.wait_for("starting 1 server")
    while not (answers.exists() and answers.stat().st_size):
        run.wait_for("")
    run.signal(signal.SIGINT)
    assert run.wait(60) == 130, run.output
    assert "stopped by SIGINT" in run.output
    assert run.survivors() == []
    assert all(json.loads(line)["set"] == "eval" for line in answers.read_text().splitlines())
