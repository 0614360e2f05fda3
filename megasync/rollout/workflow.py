"""Workflows: plain `async def` functions that turn one sample into trajectories, and how to find one by its name.

A workflow is called as `rollout(client, sample)`. `sample` holds the row's columns, "prompt_ids" and, with a chat
template, "messages"; it is the workflow's own copy. It returns a Trajectory, or a list of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from megasync.trajectory import Trajectory

Workflow = Callable[[Any, dict[str, Any]], Awaitable[Trajectory | list[Trajectory]]]


async def single_turn(client: Any, sample: dict[str, Any]) -> Trajectory:
    """The default: one answer to the prompt, left to the reward function to score."""
    reply = await client.generate(sample["prompt_ids"])
    return reply.trajectory()
