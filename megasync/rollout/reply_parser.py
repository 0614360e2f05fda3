"""Extracts tool calls and reasoning from the text of an answer with SGLang's parsers, which run in the servers.

The parsing endpoints use neither the scheduler nor the weights, so they also answer while a server is paused for a
weight sync. All servers have the same parsers, so the first answer of any server is used.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.data.messages import parse_arguments, valid_text
from megasync.errors import DataError, HttpStatusError, ServerError
from megasync.rollout.reply_formats import call_id, calls_begun
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
