"""Which of SGLang's parsers fits a chat template."""

import pytest

from megasync.config.schema import ChatConfig
from megasync.errors import ConfigError, DataError
from megasync.rollout.reply_parser import calls_begun, check_formats, known_formats, reasoning_format, tool_format


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call></tool_call> ...", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("Environment: ipython", "llama3"),
        ("'<｜tool▁calls▁begin｜>' + '```json'", "deepseekv3"),
        ("'<｜tool▁calls▁begin｜>'", "deepseekv31"),
        ("[TOOL_CALLS]", "mistral"),
    ],
)
def test_the_chat_template_tells_the_format_and_the_configuration_wins(template, name):
    assert tool_format("auto", template) == name
    assert name in known_formats("tool_format")
    assert tool_format("pythonic", template) == "pythonic"


def test_a_template_that_tells_nothing_is_an_error_that_names_the_known_formats():
    with pytest.raises(DataError, match=r"matches no known format .* deepseekv3, .*hermes, .*qwen"):
        tool_format("auto", "plain")


@pytest.mark.parametrize(
    ("template", "prompt", "name"),
    [
        ("plain", "assistant: ", None),
        ("</think>", "assistant\n", "qwen3"),
        ("</think>", "assistant\n<think>\n", "qwen3-thinking"),
    ],
)
def test_reasoning_is_looked_for_where_the_template_knows_it(template, prompt, name):
    assert reasoning_format("auto", template, lambda *_, **__: prompt) == name
    assert reasoning_format(None, template, lambda *_, **__: prompt) is None


@pytest.mark.parametrize(("key", "known"), [("tool_format", "hermes"), ("reasoning_format", "deepseek-r1")])
def test_an_unknown_format_is_refused_with_the_known_ones(key, known):
    with pytest.raises(ConfigError, match=rf"rollout\.chat\.{key}='nothing' must be auto, null, or one of .*{known}"):
        check_formats(ChatConfig(**{key: "nothing"}))
    check_formats(ChatConfig(**{key: known}))
    check_formats(ChatConfig(**{key: None}))


def test_calls_that_were_begun_are_counted_where_they_can_be_told():
    assert calls_begun("hermes", "a<tool_call>{}</tool_call><tool_call>{") == 2
    assert calls_begun("llama3", '{"name": "f"}') == 1
    assert calls_begun("llama3", "no {call}") == 0
    assert calls_begun("lfm2", "whatever") == 0
