"""The tokens that end the responses of a run."""

from __future__ import annotations

import json

import pytest
from chat_families import FAMILIES

from megasync.app.workload import PythonArguments, run_stop_ids
from megasync.config import Config


@pytest.mark.parametrize(
    ("format", "agent", "expected"),
    [("raw", None, ["<eos>"]), ("chat", None, ["<eos>", "<|im_end|>"]), ("raw", "my:agent", ["<eos>", "<|im_end|>"])],
)
def test_the_end_of_a_turn_ends_responses_if_the_run_chats(tmp_path, caplog, format, agent, expected):
    tokenizer = FAMILIES["qwen 2.5 base"].tokenizer()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    config = Config()
    config.model.path, config.data.prompt.format, config.rollout.agent = str(tmp_path), format, agent
    ids = run_stop_ids(config, PythonArguments(), tokenizer)
    assert sorted(tokenizer.convert_ids_to_tokens(ids)) == expected
    assert ("ends a turn with '<|im_end|>'" in caplog.text) == (len(expected) == 2)
