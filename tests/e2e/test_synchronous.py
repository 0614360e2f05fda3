"""`max_staleness=0` is synchronous training: the same batches and the same losses as a plain sequential loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_metrics import rows_of

import megasync
from megasync.data.digits import digit_reward

pytestmark = pytest.mark.real

PLAIN_LOOP = Path(__file__).parents[2] / "benchmarks" / "plain_loop.py"
STEPS, GROUPS, SAMPLES = 4, 4, 4


MEMORY_SAVER = Path(__file__).parents[1] / "support" / "memory_saver"
# Ranks and servers in turns. The stand-in in `MEMORY_SAVER` really frees what a server releases.
IN_TURNS = [
    "cluster.colocate=true",
    "rollout.servers=1",
    "rollout.server_args={--enable-memory-saver: true, --enable-weights-cpu-backup: true}",
]


# Rollouts inside of the driver, in one process beside it, and in more processes than servers.
@pytest.mark.parametrize("workers", [(0,), pytest.param((1, 3), marks=pytest.mark.matrix)], ids=str)
def test_zero_staleness_equals_a_sequential_loop(
    miniature, tmp_path: Path, workers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    freed = tmp_path / "freed"
    monkeypatch.setenv("PYTHONPATH", str(MEMORY_SAVER))
    monkeypatch.setenv("MEMORY_SAVER_LOG", str(freed))
    kinds = [[f"rollout.workers={number}"] for number in workers] + ([IN_TURNS] if 0 in workers else [])
    for number, overrides in enumerate(kinds):
        groups, steps = played(config, overrides, tmp_path / f"groups-{number}.jsonl")
        for step in range(STEPS):
            # Groups of one step finish in any order; the next step's cannot begin before it is published.
            batch = slice(step * GROUPS, (step + 1) * GROUPS)
            assert sorted(groups[batch]) == sorted(sequential["groups"][batch])
            assert steps[step]["train/staleness_max"] == 0
        losses = [row.get("train/loss") for row in steps]
        assert any(loss for loss in losses), "a test of losses needs some that are not zero"
        assert losses == pytest.approx(sequential["losses"], abs=1e-6)
    if 0 in workers:
        for sizes in released(freed):
            assert sizes["weights"][1:] == [0, sizes["weights"][0]] * STEPS, "freed for each step, then as before"
            assert sizes["kv_cache"][-1] > 0 and sizes["kv_cache"].count(0) == STEPS


def released(log: Path) -> list[dict[str, list[int]]]:
    """For each server process, the bytes that it held after each change, by tag."""
    servers: dict[str, dict[str, list[int]]] = {}
    for line in log.read_text().splitlines():
        process, tag, size = line.split()
        servers.setdefault(process, {}).setdefault(tag, []).append(int(size))
    return [*servers.values()]


def played(config: Path, overrides: list[str], record: Path) -> tuple[list[list], list[dict]]:
    """Prompt and responses of each group in the order of scoring, and the metrics of each step."""

    def recording_reward(completions: list[str], **columns: list) -> list[float | None]:
        line = json.dumps([columns["prompt"][0], columns["completion_ids"]]) + "\n"
        # One write: the processes of several workers append to the same file.
        file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)
        return digit_reward(completions, **columns)

    run = megasync.AsyncTrainer(config, overrides, reward=recording_reward).train()
    rows = rows_of(run.run_dir)
    return [json.loads(line) for line in record.read_text().splitlines()], [row for row in rows if "time/step" in row]
