"""`max_staleness=0` is synchronous training: the same batches and the same losses as a plain sequential loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megasync
from megasync.data.digits import digit_reward

pytestmark = pytest.mark.real

PLAIN_LOOP = Path(__file__).parents[2] / "benchmarks" / "plain_loop.py"
STEPS, GROUPS, SAMPLES = 4, 4, 4


# Rollouts inside of the driver, in one process beside it, and in more processes than servers.
@pytest.mark.parametrize("workers", [(0, 3), pytest.param((1,), marks=pytest.mark.matrix)], ids=str)
def test_zero_staleness_equals_a_sequential_loop(miniature, tmp_path: Path, workers: tuple[int, ...]) -> None:
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
    for number in workers:
        groups, steps = played(config, number, tmp_path / f"groups-{number}.jsonl")
        for step in range(STEPS):
            # Groups of one step finish in any order; the next step's cannot begin before it is published.
            batch = slice(step * GROUPS, (step + 1) * GROUPS)
            assert sorted(groups[batch]) == sorted(sequential["groups"][batch])
            assert steps[step]["train/staleness_max"] == 0
        losses = [row.get("train/loss") for row in steps]
        assert any(loss for loss in losses), "a test of losses needs some that are not zero"
        assert losses == pytest.approx(sequential["losses"], abs=1e-6)


def played(config: Path, workers: int, record: Path) -> tuple[list[list], list[dict]]:
    """Prompt and responses of each group in the order of scoring, and the metrics of each step."""

    def recording_reward(completions: list[str], **columns: list) -> list[float | None]:
        line = json.dumps([columns["prompt"][0], columns["completion_ids"]]) + "\n"
        # One write: the processes of several workers append to the same file.
        file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)
        return digit_reward(completions, **columns)

    run = megasync.AsyncTrainer(config, [f"rollout.workers={workers}"], reward=recording_reward).train()
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [json.loads(line) for line in record.read_text().splitlines()], [row for row in rows if "time/step" in row]
