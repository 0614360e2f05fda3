"""The formats of tool calls and reasoning: the names of SGLang's parsers, and the one that fits a chat template.

The parsers run in the servers (`reply_parser`), because importing them here would load half of SGLang.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import runpy
from collections.abc import Callable
from pathlib import Path

from megasync.config.schema import AUTO, ChatConfig
from megasync.errors import ConfigError, DataError

# Text that only the chat templates of one model family contain, and the parser of its tool calls. The first match wins.
_TOOL_MARKS = (
    ("<｜DSML｜", "deepseekv32"),
    ("```json", "deepseekv3"),
    ("<｜tool▁calls▁begin｜>", "deepseekv31"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|channel|>", "gpt-oss"),
    ("<tool_call>", "hermes"),
    ("Environment: ipython", "llama3"),
    ("<|python_tag|>", "llama3"),
)
# Pattern of the beginning of a call, for formats in which an unparsable call is distinguishable from text.
_CALL_BEGINS = {
    "hermes": r"<tool_call>",
    "qwen": r"<tool_call>",
    "qwen25": r"<tool_call>",
    "qwen3_coder": r"<tool_call>",
    "glm45": r"<tool_call>",
    "llama3": r"<\|python_tag\|>|\A\s*\{",
    "mistral": r"\[TOOL_CALLS\]",
    "deepseekv3": r"<｜tool▁call▁begin｜>",
    "deepseekv31": r"<｜tool▁call▁begin｜>",
    "deepseekv32": r"<｜DSML｜invoke",
    "kimi_k2": r"<\|tool_call_begin\|>",
}
# Known formats if SGLang is not installed, such as on a machine that only plans.
_WITHOUT_SGLANG = {
    "tool_format": ["deepseekv3", "deepseekv31", "deepseekv32", "hermes", "llama3", "mistral", "qwen", "qwen3_coder"],
    "reasoning_format": ["deepseek-r1", "deepseek-v3", "qwen3", "qwen3-thinking"],
}
_NAME_FILES = {
    "tool_format": ("srt/function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES"),
    "reasoning_format": ("srt/parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES"),
}


def check_formats(chat: ChatConfig) -> None:
    """Check the configured formats. Raises ConfigError for a format that SGLang does not have."""
    for key in _NAME_FILES:
        name = getattr(chat, key)
        if name not in (None, AUTO) and name not in (known := known_formats(key)):
            raise ConfigError(f"rollout.chat.{key}={name!r} must be {AUTO}, null, or one of {', '.join(sorted(known))}")


@functools.cache
def known_formats(key: str) -> list[str]:
    """Return SGLang's parser names for `key` (tool_format or reasoning_format)."""
    path, variable = _NAME_FILES[key]
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        return _WITHOUT_SGLANG[key]
    # Run by path: these two files import nothing, but their packages would import much of SGLang.
    return list(runpy.run_path(str(Path(sglang.submodule_search_locations[0]) / path))[variable])


def tool_format(configured: str | None, chat_template: str) -> str:
    """Return the name of the parser for tool calls. Raises DataError if none is known."""
    if configured is not None and configured != AUTO:
        return configured
    detected = next((name for mark, name in _TOOL_MARKS if mark in chat_template), None)
    if detected is None or configured is None:
        why = "is null" if configured is None else "matches no known format in the chat template"
        raise DataError(
            f"tools need the model's tool call format, but rollout.chat.tool_format {why}; set it to one of "
            f"{', '.join(sorted(known_formats('tool_format')))} (hermes suits models trained on none)"
        )
    return detected


def reasoning_format(configured: str | None, chat_template: str, render: Callable[..., str]) -> str | None:
    """Return the name of the parser for reasoning, or None if answers contain no reasoning.

    `render` is `ChatTemplate.render`.
    """
    if configured != AUTO:
        return configured
    if "</think>" not in chat_template:
        return None
    begun = render([{"role": "user", "content": "x"}], [], answer=True).rstrip().endswith("<think>")
    # If the prompt opens the reasoning, the answer begins inside it.
    return "qwen3-thinking" if begun else "qwen3"


def call_id(name: str, function: str, number: int) -> str:
    """The id of the call with this number in its conversation, which templates may show to the model.

    Kimi K2 writes ids itself, and its parser does not return them.
    """
    return f"functions.{function}:{number}" if name == "kimi_k2" else f"call_{number}"


def calls_begun(name: str, text: str) -> int:
    """Count the tool calls that begin in the text. 0 for formats in which they cannot be recognised."""
    return len(re.findall(_CALL_BEGINS[name], text)) if name in _CALL_BEGINS else 0
