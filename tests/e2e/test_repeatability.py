"""Two runs of one configuration compute the same bits, with a seed for each request and without staleness."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megasync.models import fetch

pytestmark = [pytest.mark.real, pytest.mark.matrix]

# What a step computes, without what the clock measures of it.
COMPUTED = ("train/", "critic/", "rollout/reward", "rollout/response_length", "groups/")
TIMED = {
    "train/seconds",
    "train/tokens_per_second",
    "train/tokens_per_second_per_device",
    "train/tflops_per_device",
}


EXPERTS = {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1, "sequence_parallel": True}
TEACHER = {"max_total_tokens": 4096, "max_running_requests": 16, "mem_fraction": 0.2}
KINDS: dict[str, dict] = {
    "plain": {},
    "data-parallel": {"trainer": {"data_parallel": 2, "optimizer": {"lr": 1.0e-2}}},
    "routing replay": {"rollout": {"servers": 2, "deterministic": True, "routing_replay": True}, "trainer": EXPERTS},
    "adapters": {"trainer": {"lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"lr": 1.0e-2}}},
    "teacher": {"algorithm": {"entropy_coef": 0.01, "teacher_coef": 0.1}},
}


@pytest.fixture(params=KINDS)
def config(miniature, digits_model: Path, request, tmp_path: Path) -> Path:
    """With two servers: which of them gets a request is up to the clock."""
    sections: dict = {
        "schedule": {"total_steps": 4, "groups_per_step": 4, "samples_per_group": 4, "max_staleness": 0},
        "rollout": {"servers": 2, "deterministic": True},
        "trainer": {"tensor_parallel": 2, "optimizer": {"lr": 1.0e-2}},
        # Every response has a gradient, whatever its reward.
        "algorithm": {"entropy_coef": 0.01},
        "checkpoint": {"export": False},
        "data": {"eval": None},
        "eval": None,
        **KINDS[request.param],
    }
    if request.param == "routing replay":
        fetch("digits_moe", tmp_path / "experts")
        sections["model"] = {"path": str(tmp_path / "experts")}
    if request.param == "teacher":
        sections["teachers"] = {"before": {"path": str(digits_model), **TEACHER}}
    return miniature(**sections)


def test_two_runs_compute_the_same_bits(config, launch, the_run_dir, tmp_path) -> None:
    runs = []
    for number in range(2):
        run = launch("train", config)
        assert run.wait() == 0, run.output
        runs.append(computed(the_run_dir()))
        shutil.move(the_run_dir(), tmp_path / str(number))
    first, second = runs
    assert len(first) == 4 and all(row["train/grad_norm"] > 0 for row in first)
    for one, other in zip(first, second, strict=True):
        assert one == other


def computed(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]
    return [
        {name: value for name, value in row.items() if name.startswith(COMPUTED) and name not in TIMED} for row in steps
    ]
