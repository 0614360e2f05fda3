"""A run that trains an agent which only knows OpenAI's API: real ranks, a real server, the real `openai` client."""

from __future__ import annotations

import json

import pytest
from tool_model import make_tool_models

import megasync

pytestmark = pytest.mark.real


def test_an_agent_named_in_the_configuration_is_trained_through_the_gateway(miniature, tmp_path) -> None:
    (model,) = make_tool_models(tmp_path, versions=1)
    config = miniature(
        model={"path": str(model)},
        data={"train": None, "eval": None},
        schedule={"total_steps": 2, "groups_per_step": 2, "samples_per_group": 2},
        rollout={
            "servers": 1,
            # The gateway and its sessions are in a process beside the driver.
            "workers": 1,
            "agent": "openai_agent:play",
            "sampling": {"temperature": 0.5, "max_new_tokens": 100},
            "context_length": 1024,
            "max_total_tokens": 8192,
        },
        trainer={"optimizer": {"lr": 1.0e-5}},
        eval=None,
        timeouts={"agent": 300.0, "request": 240.0},
        checkpoint={"export": False},
    )
    rows = [{"prompt": f"how many? {number}"} for number in range(8)]
    result = megasync.AsyncTrainer(config, train_dataset=rows).train()
    assert (result.step, result.version, result.stopped) == (2, 2, "")
    last = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["rollout/turns"] == 3.0
    assert last["rollout/turns_forked"] == 0.0
    assert last["rollout/chunks"] >= 9
    assert last["rollout/samples_failed"] == 0.0
    assert 0 < last["train/reward"] < 1
    assert last["sync/parity"] < 1e-4
