"""A run with a rollout function, a reward and rows of the caller's own, over two weight-sync modes of the servers."""

from __future__ import annotations

import pytest
from run_metrics import rows_of

import megasync
from megasync.errors import ConfigError

pytestmark = pytest.mark.real


async def two_tries(client, sample: dict) -> megasync.Trajectory:
    """Answers twice and keeps the longer answer, scored on the spot."""
    first = await client.generate(sample["prompt_ids"])
    second = await client.generate(sample["prompt_ids"], ignore_eos=True)
    best = max(first, second, key=lambda reply: len(reply.token_ids))
    return best.trajectory(reward=float(len(best.token_ids)))


def test_the_caller_may_pass_functions_and_rows(miniature) -> None:
    config = miniature(
        data={"train": None, "eval": None},
        eval=None,
        schedule={"total_steps": 3, "groups_per_step": 2, "samples_per_group": 3, "weight_sync_steps": 2},
        rollout={"router_policy": "round_robin"},
        sync={"pause_mode": "abort", "parity_every": 1},
        checkpoint={"every_steps": 2, "export": False},
    )
    rows = [{"prompt": f"={a}{b}="} for a in range(4) for b in range(4)]
    result = megasync.AsyncTrainer(config, rollout=two_tries, train_dataset=rows).train()
    assert (result.step, result.version, result.export_dir) == (3, 2, None)
    steps = rows_of(result.run_dir)
    assert len(steps) == 3
    assert all(1 <= row["train/reward"] <= 6 for row in steps)

    with pytest.raises(ConfigError, match="its own rollout, train_dataset.*AsyncTrainer.resume"):
        megasync.AsyncTrainer.resume(result.run_dir)
