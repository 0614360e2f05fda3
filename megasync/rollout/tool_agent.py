"""The ready agent: the model answers, its tool calls are run, it sees what came of them, until it calls none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megasync.errors import ContextLengthExceeded, DataError
from megasync.rollout.generation import Reply
from megasync.rollout.tools import Toolbox, as_tool
from megasync.rollout.workflow import Workflow
from megasync.trajectory import Trajectory


def tool_agent(
    functions: Sequence[Callable[..., Any]], *, max_turns: int = 8, timeout: float = 60.0, max_output: int = 8192
) -> Workflow:
    """A workflow whose model may call `functions`, at most `max_turns` answers long; see `Toolbox` for the other limits.

    It leaves the reward to the reward function, which sees the last answer's text. A malformed or failed call costs the
    model a turn. The sample ends without a further answer when the turns or the context are used up; the metrics
    `turn_limit` and `context_full` say how often.

    Raises ConfigError for a function that cannot be a tool.
    """
    tools = [as_tool(function) for function in functions]
    # Names that occur twice are refused here, not in the first sample.
    Toolbox(tools)

    async def agent(client: Any, sample: dict[str, Any]) -> list[Trajectory]:
        if "messages" not in sample:
            raise DataError("the tool agent talks in chat messages; set data.prompt.format=chat")
        toolbox = Toolbox(tools, timeout, max_output)
        messages = sample["messages"]
        reply: Reply | None = None
        ended = {"turn_limit": 0.0, "context_full": 0.0}
        for turn in range(max_turns):
            try:
                reply = await client.chat(messages, tools=toolbox.tools)
            except ContextLengthExceeded:
                if reply is None:
                    raise
                ended["context_full"] = 1.0
                break
            if not (reply.tool_calls or reply.malformed_calls):
                break
            if turn == max_turns - 1:
                ended["turn_limit"] = 1.0
                break
            messages = reply.messages + await toolbox.run(reply.tool_calls, reply.malformed_calls)
        return reply.trajectories(metrics=toolbox.metrics() | ended)

    return agent
