"""The built-in agent: runs the model's tool calls and returns the results to it until it makes no further call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from megasync.errors import ContextLengthExceeded, DataError, TemplateRefused
from megasync.rollout.tools import Toolbox, as_tool
from megasync.rollout.workflow import SampleClient, Workflow
from megasync.trajectory import Trajectory

log = logging.getLogger(__name__)
# The attribute of a workflow with the tools that it offers the model, for which a run needs the format of their calls.
TOOLS = "offered_tools"


def tool_agent(
    functions: Sequence[Callable[..., Any]], *, max_turns: int = 8, timeout: float = 60.0, max_output: int = 8192
) -> Workflow:
    """Return a workflow in which the model may call `functions`, with at most `max_turns` answers per sample.

    `timeout` (seconds per call) and `max_output` (characters per result) are passed to `Toolbox`. The reward function
    scores the text of the last answer. A malformed or failed call costs the model a turn. The sample ends when the
    turns or the context are used up, or when the chat template rejects a result; the metrics `turn_limit`,
    `context_full` and `template_refused` report these ends.

    Raises ConfigError for a function that cannot be a tool.
    """
    tools = [as_tool(function) for function in functions]
    # Rejects duplicate names now instead of in the first sample.
    Toolbox(tools)
    warned = False

    async def agent(client: SampleClient, sample: dict[str, Any]) -> list[Trajectory]:
        if "messages" not in sample:
            raise DataError("the tool agent needs chat messages; set data.prompt.format=chat")
        toolbox = Toolbox(tools, timeout, max_output)
        nonlocal warned
        ended = {"turn_limit": 0.0, "context_full": 0.0, "template_refused": 0.0}
        turns = 1
        reply = await client.chat(sample["messages"], tools=toolbox.tools)
        while reply.tool_calls or reply.malformed_calls:
            if turns == max_turns:
                ended["turn_limit"] = 1.0
                break
            messages = reply.messages + await toolbox.run(reply.tool_calls, reply.malformed_calls)
            try:
                reply = await client.chat(messages, tools=toolbox.tools)
            except ContextLengthExceeded:
                ended["context_full"] = 1.0
                break
            except TemplateRefused as error:
                if not warned:
                    warned = True
                    log.warning("The tool agent ends samples early, because of their messages: %s", error)
                ended["template_refused"] = 1.0
                break
            turns += 1
        return reply.trajectories(metrics=toolbox.metrics() | ended)

    setattr(agent, TOOLS, tuple(tools))
    return agent
