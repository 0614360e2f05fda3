"""`max_staleness=0` is synchronous training: the same batches and the same losses as a plain sequential loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import megasync
from megasync.data.digits import digit_reward

pytestmark = pytest.mark.real

PLAIN_LOOP = Path(__file__).parents[2] / "benchmarks" / "plain_loop.py"
STEPS, GROUPS, SAMPLES = 4, 4, 4


def test_zero_staleness_equals_a_sequential_loop(miniature, tmp_path: Path) -> None:
    config = miniature(
        schedule={"total_steps": STEPS, "groups_per_step": GROUPS, "samples_per_group": SAMPLES, "max_staleness": 0},
        trainer={"tensor_parallel": 1, "optimizer": {"lr": 1.0e-2}},
        rollout={"deterministic": True},
        data={"eval": None},
        eval=None,
    )
    out = tmp_path / "sequential.json"
    subprocess.run([sys.executable, str(PLAIN_LOOP), str(config), str(out), "--one-by-one"], check=True, timeout=300)
    sequential = json.loads(out.read_text())

    groups: list[list] = []

    def recording_reward(completions: list[str], **columns: list) -> list[float | None]:
        groups.append([columns["prompt"][0], columns["completion_ids"]])
        return digit_reward(completions, **columns)

    run = megasync.AsyncTrainer(config, reward=recording_reward).train()
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]

    for step in range(STEPS):
        # Groups of one step finish in any order; the next step's cannot begin before it is published.
        batch = slice(step * GROUPS, (step + 1) * GROUPS)
        assert sorted(groups[batch]) == sorted(sequential["groups"][batch])
        assert steps[step]["train/staleness_max"] == 0
    losses = [row.get("train/loss") for row in steps]
    assert any(loss for loss in losses), "a test of losses needs some that are not zero"
    assert losses == pytest.approx(sequential["losses"], abs=1e-6)
