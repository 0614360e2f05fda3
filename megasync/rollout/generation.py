"""The result of a generation: tokens, each with its log-prob and the weight version that sampled it.

The generations of a conversation form lines: the prompt of a generation begins with all tokens of its `parent`, prompt
and response. Invariant: in the trajectory of a line exactly the sampled tokens are trained, each with the log-prob and
version of its own generation. Tokens between two generations (tool output, template text) have a loss mask of 0.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megasync.trajectory import Trajectory

if TYPE_CHECKING:
    from megasync.rollout.conversation import Conversation
    from megasync.rollout.tools import ToolCall


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One response to one prompt.

    `logprobs` are natural logarithms of probabilities at the sampling temperature.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str  # "stop" or "length"
    text: str = ""
    # Number of requests: 1, plus one for each interruption.
    parts: int = 1
    parent: Generation | None = None

    def line(self) -> list[Generation]:
        """Return this generation and its ancestors, oldest first."""
        line, at = [], self
        while at is not None:
            line.append(at)
            at = at.parent
        return line[::-1]

    def trajectory(
        self,
        reward: float | None = None,
        *,
        text: str | None = None,
        metrics: dict[str, float] | None = None,
        untrained: Collection[Generation] = (),
    ) -> Trajectory:
        """Return the whole line as one trajectory.

        A reward function receives `text`, by default the text of this generation. The tokens of `untrained` generations
        get a loss mask of 0, because another trajectory trains them.
        """
        line = self.line()
        prompt, response_ids, logprobs = line[0].prompt_ids, list[int](), list[float]()
        loss_mask, versions = list[int](), list[int]()
        for generation in line:
            written = len(generation.prompt_ids) - len(prompt) - len(response_ids)
            between = generation.prompt_ids[len(generation.prompt_ids) - written :]
            response_ids.extend(between + generation.token_ids)
            loss_mask.extend([0] * written + [int(generation not in untrained)] * len(generation.token_ids))
            logprobs.extend([0.0] * written + generation.logprobs)
            # Tokens between generations were not sampled. Their versions only fill the list and are never read.
            last = versions[-1] if versions else 0
            versions.extend([last] * written + generation.versions)
        return Trajectory(
            prompt_ids=prompt,
            response_ids=response_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            finish_reason=self.finish_reason,
            text=self.text if text is None else text,
            reward=reward,
            metrics=dict(metrics or {}),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant's turn of a chat, with all messages up to it."""

    # The parsed answer is the last one: "content", and "tool_calls" and "reasoning_content" if present.
    messages: list[dict[str, Any]]
    generation: Generation
    conversation: Conversation
    tool_calls: list[ToolCall] = field(default_factory=list)
    # Number of tool calls that begin but that the parser of the model's format cannot parse.
    malformed_calls: int = 0

    @property
    def text(self) -> str:
        """Everything that the model wrote, including reasoning and tool calls."""
        return self.generation.text

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.messages[-1]["content"]

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    def trajectory(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> Trajectory:
        """Return the line of turns that ends with this reply as one trajectory.

        If the conversation forked, use `trajectories`, which includes the other lines.
        """
        return self.generation.trajectory(reward, metrics=self.conversation.metrics() | (metrics or {}))

    def trajectories(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> list[Trajectory]:
        """Return all lines, with every sampled token trained once; see `Conversation.trajectories`."""
        return self.conversation.trajectories(reward, metrics)
