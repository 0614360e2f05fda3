"""A run that trains an agent which only knows OpenAI's API: real ranks, a real server, the real `openai` client."""

from __future__ import annotations

import pytest
from run_metrics import rows_of
from tiny_models import byte_tokenizer
from tool_model import make_tool_models

import megasync
from megasync.trajectory import ANSWER
from megasync.watch.recorded import TRAINED, Filters, RolloutIndex

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
    last = rows_of(result.run_dir)[-1]
    assert last["rollout/turns"] == 3.0
    assert last["rollout/turns_forked"] == 0.0
    assert last["rollout/chunks"] >= 9
    assert last["rollout/samples_failed"] == 0.0
    assert 0 < last["train/reward"] < 1
    assert last["sync/parity"] < 1e-4
    _check_recorded_turns(result.run_dir, byte_tokenizer())


def _check_recorded_turns(run_dir, tokenizer) -> None:
    """Turns were noted by a worker, sent through the buffer, and recorded by a rank."""
    index = RolloutIndex(run_dir)
    index.update()
    rows = index.select(Filters(dropped=TRAINED))
    assert rows
    for response in map(index.read, rows):
        said = [
            (turn.role, turn.name, tokenizer.decode(response.ids[turn.start : turn.end])) for turn in response.turns
        ]
        assert [(role, name) for role, name, _ in said] == [
            (ANSWER, ""), ("tool", "look"), (ANSWER, ""), ("tool", "add"), (ANSWER, "")
        ]  # fmt: skip
        assert [call.name for turn in response.turns for call in turn.calls] == ["look", "add"]
        assert said[0][2].startswith("<tool_call>") and said[0][2].endswith("</tool_call><eos>")
        assert said[1][2] == "<bos>tool: 4<eos><bos>assistant: "
