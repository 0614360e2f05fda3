"""The built-in agent: runs the model's tool calls and returns the results to it until it makes no further call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from megasync.concurrency.tasks import gather_or_cancel
from megasync.errors import ContextLengthExceeded, DataError, TemplateRefused
from megasync.rollout.tools import Tool, Toolbox, ToolServer, as_tool
from megasync.rollout.workflow import OpenedWorkflow, SampleClient
from megasync.trajectory import Trajectory

log = logging.getLogger(__name__)


class ToolAgent(OpenedWorkflow):
    """`rollout(client, sample)` that offers the model tools: functions, and those of MCP servers.

    `offered` are the tools that are known: those of servers after `open`.
    """

    def __init__(
        self, tools: Sequence[Tool], servers: Sequence[ToolServer], max_turns: int, timeout: float, max_output: int
    ) -> None:
        # What messages and metrics call it.
        self.__name__ = tool_agent.__name__
        self._tools, self._servers = tools, servers
        self._max_turns, self._timeout, self._max_output = max_turns, timeout, max_output
        self._warned = False

    @property
    def offered(self) -> list[Tool]:
        return [*self._tools, *(tool for server in self._servers for tool in server.offered)]

    async def open(self) -> None:
        """Starts each MCP server once, to list its tools.

        Raises ServiceFailed, or ConfigError for tools that cannot be offered, such as two of the same name.
        """
        await gather_or_cancel(*(server.open() for server in self._servers))
        Toolbox(self.offered)

    async def close(self) -> None:
        """Ends the MCP servers."""
        await gather_or_cancel(*(server.close() for server in self._servers))

    async def __call__(self, client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        if "messages" not in sample:
            raise DataError("the tool agent needs chat messages; set data.prompt.format=chat")
        async with AsyncExitStack() as stack:
            return await self._play(client, sample["messages"], await self._toolbox(stack))

    async def _toolbox(self, stack: AsyncExitStack) -> Toolbox:
        tools = [*self._tools]
        # One after the other: samples that took places of several servers in any order could wait for each other.
        for server in self._servers:
            tools += await stack.enter_async_context(server.session())
        return Toolbox(tools, self._timeout, self._max_output)

    async def _play(self, client: SampleClient, messages: list[dict[str, Any]], toolbox: Toolbox) -> list[Trajectory]:
        ended = {"turn_limit": 0.0, "context_full": 0.0, "template_refused": 0.0}
        turns = 1
        reply = await client.chat(messages, tools=toolbox.tools)
        while reply.tool_calls or reply.malformed_calls:
            if turns == self._max_turns:
                ended["turn_limit"] = 1.0
                break
            messages = reply.messages + await toolbox.run(reply.tool_calls, reply.malformed_calls)
            try:
                reply = await client.chat(messages, tools=toolbox.tools)
            except ContextLengthExceeded:
                ended["context_full"] = 1.0
                break
            except TemplateRefused as error:
                if not self._warned:
                    self._warned = True
                    log.warning("The tool agent ends samples early, because of their messages: %s", error)
                ended["template_refused"] = 1.0
                break
            turns += 1
        return reply.trajectories(metrics=toolbox.metrics() | ended)


def tool_agent(
    tools: Sequence[Callable[..., Any] | Tool | ToolServer],
    *,
    max_turns: int = 8,
    timeout: float = 60.0,
    max_output: int = 8192,
) -> ToolAgent:
    """Return a workflow in which the model may call `tools`, with at most `max_turns` answers per sample.

    `tools` are functions, and MCP servers with all that they offer. `timeout` (seconds per call) and `max_output`
    (characters per result) are passed to `Toolbox`. The reward function scores the text of the last answer. A malformed
    or failed call costs the model a turn. The sample ends when the turns or the context are used up, or when the chat
    template rejects a result; the metrics `turn_limit`, `context_full` and `template_refused` report these ends.

    Raises ConfigError for a function that cannot be a tool.
    """
    servers = [tool for tool in tools if isinstance(tool, ToolServer)]
    functions = [as_tool(tool) for tool in tools if not isinstance(tool, ToolServer)]
    # Rejects duplicate names now instead of in the first sample.
    Toolbox(functions)
    return ToolAgent(functions, servers, max_turns, timeout, max_output)
