"""What one generation brought back: tokens with the log-prob and the weight version that each was sampled under.

Generations of one conversation form lines: `parent` is the one whose prompt and response this one's prompt begins with,
token for token. Invariant: in the trajectory of a line exactly the sampled tokens are trained, each with the log-prob
and version of its own generation; what lies between two generations (tool output, template text) has a loss mask of 0.
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
    """One response to one prompt. `logprobs` are natural logarithms, of the distribution at the sampling temperature."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str  # "stop" or "length"
    text: str = ""
    # Requests it took: 1, and one more for every interruption.
    parts: int = 1
    parent: Generation | None = None

    def line(self) -> list[Generation]:
        """The generations that led here, the first one first."""
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
        """The whole line as one trajectory; `text`, this generation's own by default, is what a reward function sees.

        The tokens of `untrained` generations get a loss mask of 0: another trajectory has them.
        """
        line = self.line()
        whole = Trajectory(
            prompt_ids=list(line[0].prompt_ids),
            response_ids=[],
            loss_mask=[],
            logprobs=[],
            versions=[],
            finish_reason=self.finish_reason,
            text=self.text if text is None else text,
            reward=reward,
            metrics=dict(metrics or {}),
        )
        for generation in line:
            written = len(generation.prompt_ids) - len(whole.prompt_ids) - len(whole.response_ids)
            between = generation.prompt_ids[len(generation.prompt_ids) - written :]
            whole.response_ids.extend(between + generation.token_ids)
            whole.loss_mask.extend([0] * written + [int(generation not in untrained)] * len(generation.token_ids))
            whole.logprobs.extend([0.0] * written + generation.logprobs)
            # Nobody sampled what lies between; it is given a version so that the list has no gap, and never looked at.
            last = whole.versions[-1] if whole.versions else 0
            whole.versions.extend([last] * written + generation.versions)
        return whole


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant's turn of a chat, and the messages that led to it."""

    # The answer comes last, parsed: "content", and "tool_calls" and "reasoning_content" where it has them.
    messages: list[dict[str, Any]]
    generation: Generation
    conversation: Conversation
    tool_calls: list[ToolCall] = field(default_factory=list)
    # Beginnings of tool calls that the parser of the model's format could make nothing of.
    malformed_calls: int = 0

    @property
    def text(self) -> str:
        """All that the model wrote, reasoning and tool calls included."""
        return self.generation.text

    @property
    def content(self) -> str:
        """What is left of the text without reasoning and tool calls."""
        return self.messages[-1]["content"]

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    def trajectory(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> Trajectory:
        """The line of turns that ends here. Where the conversation forked, `trajectories` has what this leaves out."""
        return self.generation.trajectory(reward, metrics=self.conversation.metrics() | (metrics or {}))

    def trajectories(self, reward: float | None = None, metrics: dict[str, float] | None = None) -> list[Trajectory]:
        """Every token of the conversation that was sampled, each trained once; see `Conversation.trajectories`."""
        return self.conversation.trajectories(reward, metrics)
