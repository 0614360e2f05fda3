"""A killed run computes what one that was not killed computes, with a seed for each request and without staleness.

Before its last checkpoint it computes the same bits: two runs of one configuration repeat each other.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_metrics import steps_of

from megasync.lab.chaos.report import read_ledger
from megasync.starters.fetch import fetch

pytestmark = [pytest.mark.real, pytest.mark.matrix]

STEPS, SAVED = 6, 3
# What a step computes, without what the clock measures of it; of that, what is the same after a checkpoint too.
COMPUTED = ("train/", "critic/", "rollout/reward", "rollout/response_length", "groups/")
TIMED = {
    "train/seconds",
    "train/tokens_per_second",
    "train/tokens_per_second_per_device",
    "train/tflops_per_device",
}
RESUMED = ("train/loss", "critic/loss", "train/teacher_kl")

EXPERTS = {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1, "sequence_parallel": True}
TEACHER = {"max_total_tokens": 4096, "max_running_requests": 16, "mem_fraction": 0.2}
FAST = {"optimizer": {"lr": 1.0e-2}}
CRITIC = {"advantage": "gae", "kl_coef": 0.01, "kl_in": "reward", "kl_kind": "k1"}
KINDS: dict[str, dict] = {
    "plain": {},
    "data-parallel": {"trainer": {"data_parallel": 2, **FAST}},
    # Pieces of two tokens, so that a response's routes and supports come in several.
    "routing replay": {
        "rollout": {"routing_replay": True, "stream_interval": 2},
        "trainer": EXPERTS | {"recompute": "full"} | FAST,
    },
    "truncated sampling": {
        "rollout": {"sampling": {"max_new_tokens": 6, "top_k": 4, "top_p": 0.9}, "stream_interval": 2}
    },
    "adapters": {"trainer": {"lora": {"rank": 4, "alpha": 8.0}, **FAST}},
    "critic and teacher": {
        "algorithm": {"entropy_coef": 0.01, "teacher_coef": 0.1, **CRITIC},
        "critic": {"enabled": True, **FAST},
    },
}


@pytest.fixture(params=KINDS)
def config(miniature, digits_model: Path, request, tmp_path: Path) -> Path:
    """With two servers: which of them gets a request is up to the clock."""
    sections: dict = {
        "schedule": {"total_steps": STEPS, "max_staleness": 0},
        "trainer": {"tensor_parallel": 2, **FAST},
        # Every response has a gradient, whatever its reward.
        "algorithm": {"entropy_coef": 0.01},
        "checkpoint": {"every_steps": SAVED, "export": False},
        "data": {"eval": None},
        "eval": None,
        **KINDS[request.param],
    }
    sections["rollout"] = {"servers": 2, "deterministic": True} | sections.get("rollout", {})
    if request.param == "routing replay":
        sections["model"] = {"path": str(fetch("digits_moe", tmp_path / "experts"))}
    if "teacher" in request.param:
        sections["teachers"] = {"before": {"path": str(digits_model), **TEACHER}}
    return miniature(**sections)


def test_a_killed_run_repeats_the_one_that_was_not(config, launch, the_run_dir, tmp_path) -> None:
    whole = launch("train", config)
    assert whole.wait() == 0, whole.output
    expected = steps_of(the_run_dir())
    assert len(expected) == STEPS
    # Servers compute what the trainer computes: with the same experts, and of the tokens that could be sampled.
    assert all(row["train/grad_norm"] > 0 and row["train/logprob_diff"] < 1e-4 for row in expected)
    shutil.move(the_run_dir(), tmp_path / "whole")
    killed = launch("train", config)
    killed.wait_for(f"step {SAVED + 1}/")
    killed.process.kill()
    killed.wait()
    assert killed.survivors() == [], "a killed driver takes everything with it"
    resumed = launch("resume", the_run_dir())
    assert resumed.wait() == 0, resumed.output
    assert resumed.survivors() == []
    counts = read_ledger(the_run_dir() / "ledger.db")
    assert (counts.trained, counts.live) == (STEPS * 4, 0), "whole batches to the end"
    for one, other in zip(expected, steps_of(the_run_dir()), strict=True):
        if one["step"] <= SAVED:
            assert computed(one) == computed(other)
        for name in one.keys() & {*RESUMED}:
            assert other[name] == pytest.approx(one[name], abs=1e-5), (one["step"], name)


def computed(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(COMPUTED) and name not in TIMED}
