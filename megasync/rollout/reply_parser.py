"""Extracts tool calls and reasoning from the text of an answer with SGLang's parsers, which run in the servers.

Which parser fits a model is configured, or found by its chat template. Importing them here would load half of SGLang.

The parsing endpoints use neither the scheduler nor the weights, so they also answer while a server is paused for a
weight sync. All servers have the same parsers, so the first answer of any server is used.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import logging
import re
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.config.schema import AUTO, ChatConfig
from megasync.data.messages import parse_arguments, valid_text
from megasync.errors import ConfigError, DataError, HttpStatusError, ServerError
from megasync.rollout.tools import ToolCall
from megasync.serving.answers import parse_as
from megasync.serving.control import ServerControl

log = logging.getLogger(__name__)

T = TypeVar("T")

# Timeout of one server's answer, and the pause before all servers are tried again, both in seconds.
_ANSWER_SECONDS = 20.0
_ROUND_SECONDS = 0.5
# The status of an exception in the parser, and the statuses of an invalid request.
_PARSER_FAILED = 500
_BAD_REQUEST = frozenset({400, 422})


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


@prepared
class _Separated(msgspec.Struct):
    reasoning_text: str | None
    text: str | None


@prepared
class _ParsedCall(msgspec.Struct):
    name: str | None = None
    parameters: str | None = None


@prepared
class _Parsed(msgspec.Struct):
    calls: list[_ParsedCall]
    normal_text: str | None


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed answer. `content` is the remaining text; `malformed` counts calls that begin but cannot be parsed."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


class ReplyParser:
    """Parses answers on the servers.

    `servers` returns the servers that are available now. `timeout` is in seconds for each endpoint call, over all
    retries.
    """

    def __init__(self, servers: Callable[[], Sequence[ServerControl]], timeout: float) -> None:
        self._servers = servers
        self._timeout = timeout
        self._turn = itertools.count()

    async def parse(
        self,
        text: str,
        tools: Sequence[dict[str, Any]],
        tool_format: str | None,
        reasoning_format: str | None,
        *,
        called: int = 0,
    ) -> ParsedAnswer:
        """Extract the reasoning, then the calls of `tools`. A format of None skips the step.

        `called` is the number of calls in the conversation so far, from which ids are counted.

        Raises ServerError if no server answers in time, and DataError if a server rejects the tools or the format. Text
        that makes a parser fail counts as malformed and raises no error.
        """
        reasoning = ""
        if reasoning_format is not None:
            body = {"text": text, "reasoning_parser": reasoning_format}
            if (separated := await self._ask("/separate_reasoning", body, _Separated)) is not None:
                reasoning, text = separated.reasoning_text or "", separated.text or ""
        if tool_format is None:
            return ParsedAnswer(text, reasoning)
        begun = calls_begun(tool_format, text)
        body = {"text": text, "tools": list(tools), "tool_call_parser": tool_format}
        parsed = await self._ask("/parse_function_call", body, _Parsed)
        if parsed is None:
            return ParsedAnswer(text, reasoning, malformed=max(1, begun))
        named = [call for call in parsed.calls if call.name]
        calls = tuple(
            _tool_call(call_id(tool_format, call.name or "", called + number), call)
            for number, call in enumerate(named)
        )
        # The remaining text may lack the malformed calls, but the model must see what it wrote.
        content = (parsed.normal_text or "") if calls else text
        return ParsedAnswer(content, reasoning, calls, max(0, begun - len(calls)))

    async def _ask(self, path: str, body: dict[str, Any], form: type[T]) -> T | None:
        """Return the first valid answer of any server, or None if the parser itself failed."""
        failure = "no server is available"
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    servers = list(self._servers())
                    start = next(self._turn)
                    for offset in range(len(servers)):
                        server = servers[(start + offset) % len(servers)]
                        try:
                            answer = await server.post(path, body, timeout=_ANSWER_SECONDS)
                            return parse_as(answer, form, server.url + path)
                        except HttpStatusError as error:
                            if error.status in _BAD_REQUEST:
                                raise DataError(
                                    f"SGLang rejects a tool's schema or the parser's name: {error}"
                                ) from error
                            if error.status == _PARSER_FAILED:
                                log.debug("SGLang's parser failed on an answer: %s", error)
                                return None
                            # The server is shutting down, or a proxy in front of it failed.
                            failure = str(error)
                        except ServerError as error:
                            failure = str(error)
                    await asyncio.sleep(_ROUND_SECONDS)
        except TimeoutError:
            raise ServerError(f"no server parsed an answer within {self._timeout:g} s: {failure}") from None


def _tool_call(call_id: str, call: _ParsedCall) -> ToolCall:
    raw = valid_text(call.parameters or "{}")
    arguments = parse_arguments(raw)
    return ToolCall(call_id, valid_text(call.name or ""), arguments if isinstance(arguments, dict) else None, raw)


def check_formats(chat: ChatConfig) -> None:
    """Check the configured formats. Raises ConfigError for a format that SGLang does not have."""
    for key in _NAME_FILES:
        name = getattr(chat, key)
        if name not in (None, AUTO) and name not in (formats := known_formats(key)):
            raise ConfigError(
                f"rollout.chat.{key}={name!r} must be {AUTO}, null, or one of {', '.join(sorted(formats))}"
            )


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
