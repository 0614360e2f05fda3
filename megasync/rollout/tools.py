"""Tools: plain Python functions that the model may call, and the execution of its calls.

A tool has type hints and a Google-style docstring, from which its JSON schema is generated. It may be async. Invariant:
every call yields one observation for the model within its deadline, whatever the model or the tool did wrong;
`Toolbox.run` guarantees it. The only exception is a ServerError, which ends the sample, because the model should not
learn from an outage. Tools of servers (`ToolServer`) are called in the same way.

A sync tool runs in its own thread. A thread cannot be killed, so a tool that exceeds its deadline is abandoned and
counts against `THREADS` until it returns. The deadline starts with the tool; waiting for a thread does not count.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

from megasync.base.importing import name_of
from megasync.concurrency.first_use import prepared
from megasync.concurrency.foreign import DeadlineExceeded, explain, invoke, is_async, run
from megasync.concurrency.threads import AllThreadsStuck, DaemonThreads
from megasync.errors import ConfigError, DataError, is_infrastructure, raised_as
from megasync.observe import trace

log = logging.getLogger(__name__)

# Maximum concurrent calls of one sync tool in one process; further calls wait.
THREADS = 64
_threads = DaemonThreads(THREADS)


class ToolFailed(Exception):
    """A tool's own report of a failed call, which the model sees as it is."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is None if the model wrote no valid JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw_arguments: str = ""

    def message(self) -> dict[str, Any]:
        """Return the call as an entry of an assistant message, with arguments as in `data/messages.py`."""
        arguments = self.raw_arguments if self.arguments is None else self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}

    @property
    def key(self) -> str:
        """A key that is equal for equal calls, regardless of their ids."""
        if self.arguments is None:
            return f"{self.name} {self.raw_arguments}"
        return f"{self.name} {json.dumps(self.arguments, sort_keys=True, default=str)}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function with its JSON schema for the model and the types of its arguments."""

    function: Callable[..., Any]
    schema: dict[str, Any]
    _types: dict[str, Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @property
    def source(self) -> str:
        """Where the tool comes from, for messages."""
        return name_of(self.function)

    async def call(self, arguments: dict[str, Any], seconds: float) -> str:
        """Calls the tool with bound arguments and returns its result as text.

        Raises DeadlineExceeded after `seconds`, AllThreadsStuck, or what the tool raises.
        """
        return await _within(self.function, arguments, seconds)

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments to their declared types. Raises DataError that names the invalid argument."""
        with raised_as(DataError, f"{self.name} takes {', '.join(self._types) or 'no arguments'}", of=TypeError):
            inspect.signature(self.function).bind(**arguments)
        bound = {}
        for name, value in arguments.items():
            with raised_as(DataError, f"argument {name!r} of {self.name}", of=msgspec.ValidationError):
                bound[name] = invoke(msgspec.convert, value, self._types.get(name, Any), strict=False)
        return bound


class ToolServer(ABC):
    """A server whose tools a model may call, such as one of the Model Context Protocol."""

    @property
    @abstractmethod
    def offered(self) -> list[Tool]:
        """The tools as far as they are known: after `open`. Those of a `session` can be called."""

    @abstractmethod
    async def open(self) -> None:
        """Starts the server and lists its tools.

        Raises ServiceFailed, or ConfigError for tools that cannot be offered.
        """

    @abstractmethod
    def session(self) -> AbstractAsyncContextManager[list[Tool]]:
        """The tools of one sample, whose names and schemas stay as they are until its end.

        Raises ServiceFailed if the server cannot be reached, and ServiceDown if it has not been for long.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends all connections and processes."""


def as_tool(function: Callable[..., Any] | Tool) -> Tool:
    """Return the function as a tool.

    Raises ConfigError if it lacks type hints or a docstring that describes its arguments.
    """
    return function if isinstance(function, Tool) else _tool(function)


@functools.lru_cache(maxsize=256)
def _tool(function: Callable[..., Any]) -> Tool:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = invoke(get_json_schema, function)
        hints = invoke(get_type_hints, function).items()
        types = {name: prepared(kind) for name, kind in hints if name != "return"}
    except Exception as error:  # transformers' own errors, and any error of resolving a type hint
        raise ConfigError(
            f"{name_of(function)} cannot be a tool: {explain(error)}; give every argument a type hint and a line under "
            f"'Args:' in the docstring"
        ) from error
    # Models are not trained on a "return" entry.
    schema["function"].pop("return", None)
    return Tool(function, schema, types)


@dataclass(slots=True)
class Toolbox:
    """The tools of one sample. `timeout` is in seconds per call, `max_output` in characters per observation.

        toolbox = Toolbox([search, fetch])
        reply = await client.chat(messages, tools=toolbox.tools)
        messages = reply.messages + await toolbox.run(reply.tool_calls)

    `counts` counts the calls so far by kind: calls, errors, timeouts, unknown, malformed, repeated.
    """

    functions: Sequence[Callable[..., Any] | Tool]
    timeout: float = 60.0
    max_output: int = 8192
    counts: Counter[str] = field(default_factory=Counter)
    tools: list[Tool] = field(init=False)
    _seen: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.tools = [as_tool(function) for function in self.functions]
        known: dict[str, Tool] = {}
        for tool in self.tools:
            if (other := known.get(tool.name)) is not None:
                raise ConfigError(
                    f"two tools have the name {tool.name!r}, by which the model calls them: of {other.source} and of "
                    f"{tool.source}; rename one, or give an MCP server a prefix"
                )
            known[tool.name] = tool

    async def run(self, calls: Sequence[ToolCall], malformed: int = 0) -> list[dict[str, Any]]:
        """Run all calls concurrently. Returns one message per call, in order, plus one if any call was malformed.

        Raises the ServerError of a tool, or the error that wraps it (`raise ... from`), after all calls have ended.
        """
        texts = await asyncio.gather(*(self._observation(call) for call in calls), return_exceptions=True)
        for text in texts:
            if isinstance(text, BaseException):
                raise text
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        if malformed:
            self.counts["malformed"] += malformed
            text = f"Error: {malformed} tool call{'s' * (malformed > 1)} could not be parsed. Write the call again."
            messages.append({"role": "tool", "content": text})
        return messages

    def metrics(self) -> dict[str, float]:
        """Return the counts of the sample so far, with the prefix `tool_`."""
        kinds = ("calls", "errors", "timeouts", "unknown", "malformed", "repeated")
        return {f"tool_{kind}": float(self.counts[kind]) for kind in kinds}

    async def _observation(self, call: ToolCall) -> str:
        self.counts["calls"] += 1
        if call.key in self._seen:
            self.counts["repeated"] += 1
        self._seen.add(call.key)
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            self.counts["unknown"] += 1
            names = ", ".join(tool.name for tool in self.tools) or "none"
            return f"Error: there is no tool {call.name!r}. Known tools: {names}."
        if call.arguments is None:
            self.counts["malformed"] += 1
            return f"Error: the arguments of {call.name} are not a JSON object: {self._cut(call.raw_arguments)}"
        try:
            arguments = tool.bind(call.arguments)
        except DataError as error:
            self.counts["malformed"] += 1
            return f"Error: {self._cut(str(error))}"
        try:
            with trace.span("tool", call.name):
                return self._cut(await tool.call(arguments, self.timeout))
        except DeadlineExceeded:
            self.counts["timeouts"] += 1
            return f"Error: {call.name} did not answer within {self.timeout:g} s."
        except AllThreadsStuck:
            self.counts["timeouts"] += 1
            return f"Error: {call.name} is not available: none of its {THREADS} earlier calls has ended."
        except Exception as error:  # a user's tool may raise anything
            if is_infrastructure(error):
                raise
            self.counts["errors"] += 1
            log.debug("Tool %s failed", call.name, exc_info=error)
            return f"Error: {self._cut(str(error) if isinstance(error, ToolFailed) else explain(error))}"

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_output:
            return text
        return f"{text[: self.max_output]}\n[{len(text) - self.max_output} more characters]"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


async def _within(function: Callable[..., Any], arguments: dict[str, Any], seconds: float) -> str:
    """Call the function and return its result as text.

    Raises DeadlineExceeded after `seconds`, without waiting for the function to end, and AllThreadsStuck if abandoned
    calls hold all threads of a sync function.
    """
    name = f"tool {name_of(function)}"
    if is_async(function):
        return await run(_awaited, name, seconds, function, arguments)
    return await _threads.call(lambda: _written(function(**arguments)), name, seconds)


async def _awaited(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    return _written(await function(**arguments))
