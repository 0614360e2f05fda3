"""The deep-research example as a person starts it: real retriever, shards, refine server, trainer and agent server.

Its model has random weights and whole tool calls for tokens, so that it searches by chance.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from deepresearch.corpus import encyclopaedia
from run_metrics import steps_of
from word_model import make_word_model

pytestmark = pytest.mark.real

SCRIPT = Path(__file__).parents[2] / "examples" / "deepresearch" / "run.sh"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def words() -> list[str]:
    documents, _ = encyclopaedia()
    towns = [document.title for document in documents if document.id.startswith("town")]
    return [
        *(call("search", query=f"the town of {town}") for town in towns[:6]),
        call("find", query="a tool that does not exist"),
        '<tool_call>{"name": </tool_call>',
        *(f"<answer>{town}</answer>" for town in towns[:2]),
    ]


def test_the_example_searches_trains_and_cleans_up(miniature, execute, the_run_dir, tmp_path, monkeypatch) -> None:
    model = str(make_word_model(tmp_path / "model", words()))
    config = miniature(
        model={"path": model},
        data={"train": None, "eval": None, "prompt": {"format": "chat", "max_tokens": 64}},
        schedule={"total_steps": 2, "groups_per_step": 2, "samples_per_group": 4},
        rollout={
            "servers": 1,
            "workers": 2,
            "workflow": "deepresearch.agent:SearchAgent",
            "workflow_options": {"refiner": "refiner", "instructions": False, "max_turns": 3},
            "sampling": {"max_new_tokens": 3},
            "context_length": 256,
            "chat": {"tool_format": "hermes"},
        },
        auxiliary_models={
            "refiner": {
                "path": model,
                "max_new_tokens": 3,
                "max_total_tokens": 4096,
                "max_running_requests": 16,
                "mem_fraction": 0.3,
            }
        },
        trainer={"tensor_parallel": 1},
        eval={"every_steps": 0, "samples": 4},
        checkpoint={"export": False},
    )
    monkeypatch.setenv("PYTHON", sys.executable)
    run = execute("bash", SCRIPT, "--config", config, "--data", tmp_path / "data")
    run.wait_for("starting Ray")
    assert run.find("--shard 0") and run.find("--shard 1"), run.output
    assert run.find("deepresearch.retriever"), run.output
    assert run.wait() == 0, run.output

    steps = steps_of(the_run_dir())
    assert [row["step"] for row in steps] == [1, 2]
    last = steps[-1]
    assert last["rollout/agent/searches"] > 0
    assert last["rollout/agent/malformed"] > 0
    assert last["rollout/turns"] > 1
    assert last["train/staleness_max"] <= 2
    assert last["rollout/agent/unrefined"] == 0
    assert (last["auxiliary_models/refiner/servers"], last["auxiliary_models/refiner/restarts"]) == (1.0, 0.0)
    assert last["auxiliary_models/refiner/requests"] > 0
    assert "| step | reward |" in run.output
    stats = json.loads(run.output.partition("the retriever: ")[2].splitlines()[0])
    assert stats["requests"] > 0
    assert (stats["failed"], stats["invalid_rows"]) == (0, 0)
    assert run.survivors() == []
