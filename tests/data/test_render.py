"""Rendering: the text that the model reads, and the prompts that are refused before the run."""

import json
from pathlib import Path

import pytest
from tiny_models import byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megasync.config.schema import PromptConfig
from megasync.data import Renderer, split_examples
from megasync.data.tokenizer import load_tokenizer
from megasync.errors import DataError
from megasync.starters.digits import digits_tokenizer

ROWS = [{"prompt": f"+{n}=", "answer": str(n + 1)} for n in range(3)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}bot>{% endif %}"
)


def renderer(solved=(), vocab_size=16, chat_template=None, **config):
    tokenizer = digits_tokenizer()
    tokenizer.chat_template = chat_template
    return Renderer(tokenizer, PromptConfig(**config), vocab_size, solved)


def test_raw_format_renders_the_prompt_column_by_default():
    assert renderer().text(ROWS[1]) == "+1="
    assert renderer().prompt_ids(ROWS[1]) == [12, 1, 10]


def test_few_shot_examples_come_from_the_first_rows_and_are_excluded_from_training():
    config = PromptConfig(examples=2, system="=", example_template="{prompt}{answer}<", template="{prompt}?")
    examples, rest = split_examples(ROWS, config)
    assert (examples, rest) == (ROWS[:2], ROWS[2:])
    assert Renderer(digits_tokenizer(), config, 16, examples).text(rest[0]) == "=+0=1<+1=2<+2=?"


def test_chat_format_uses_the_tokenizer_template_and_the_system_message():
    chat = renderer(chat_template=TEMPLATE, format="chat", system="be brief")
    assert chat.text(ROWS[0]) == "system>be brief;user>+0=;bot>"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert chat.text({"prompt": messages}) == "system>be brief;user>1;assistant>2;bot>"
    assert chat.messages(ROWS[0])[-1] == {"role": "user", "content": "+0="}


@pytest.mark.parametrize("format", ["raw", "chat"])
def test_half_of_a_surrogate_pair_is_encoded_as_the_replacement_character(format):
    tokenizer = byte_tokenizer(TEMPLATE)
    ids = Renderer(tokenizer, PromptConfig(format=format), 300).prompt_ids({"prompt": "a\ud83d"})
    assert "a\ufffd" in tokenizer.decode(ids)


def test_rendering_does_not_modify_the_row():
    row = {"prompt": [{"role": "user", "content": "1"}]}
    renderer(chat_template=TEMPLATE, format="chat").messages(row)[0]["content"] = "changed"
    assert row["prompt"][0]["content"] == "1"


def test_overlong_prompts_are_rejected_with_their_count_and_the_first_row():
    rows = [{"prompt": "1"}, {"prompt": "12345"}, {"prompt": "123456"}]
    with pytest.raises(
        DataError, match=r"2 of 3 prompts are longer than data.prompt.max_tokens=4; the first is row 1 with 5"
    ):
        renderer(max_tokens=4).prompts(rows)
    assert renderer(max_tokens=6).prompts(rows)[1] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: renderer(format="chat"), "no chat template; use data.prompt.format=raw"),
        (lambda: renderer(ROWS[:1], chat_template=TEMPLATE, format="chat", examples=1), "format=raw"),
        (lambda: renderer(ROWS[:1]), "examples=0, but 1 solved rows"),
        (lambda: renderer().prompt_ids({"prompt": ""}), "has no tokens"),
        (lambda: renderer(vocab_size=10).prompt_ids(ROWS[0]), "token id 12, outside the model's vocabulary of 10"),
        (lambda: renderer().text({"prompt": [{"role": "user", "content": "1"}]}), "set data.prompt.format=chat"),
        (lambda: split_examples(ROWS, PromptConfig(examples=3)), "leaves nothing of 3 training rows"),
        (lambda: renderer([{"prompt": "1"}], examples=1), "row 0 has no answer"),
    ],
)
def test_invalid_prompt_settings_and_rows_are_rejected(make, message):
    with pytest.raises(DataError, match=message):
        make()


def kimi_folder(path):
    """A folder with Kimi-K2's config.json, whose model type Hugging Face lacks."""
    config = Path(__file__).parents[2] / "configs/models/kimi_k2.json"
    (path / "config.json").write_text(config.read_text())
    return path


def test_a_tokenizer_is_loaded_beside_a_model_type_that_hugging_face_lacks(tmp_path):
    Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="two")).save(str(kimi_folder(tmp_path) / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode("one") == [0]


def test_a_tokenizer_in_python_code_is_refused(tmp_path):
    """Kimi-K2's."""
    names = {"tokenizer_class": "Code", "auto_map": {"AutoTokenizer": ["code.Code", None]}}
    (kimi_folder(tmp_path) / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "code.py").write_text("raise SystemExit\n")
    with pytest.raises(DataError, match=r"model\.path=.* has a tokenizer in Python code.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
