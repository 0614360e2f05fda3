"""What one generation brought back: tokens with the log-prob and the weight version that each was sampled under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megasync.buffer.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
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

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """All sampled tokens are trained."""
        return Trajectory(
            prompt_ids=list(self.prompt_ids),
            response_ids=list(self.token_ids),
            loss_mask=[1] * len(self.token_ids),
            logprobs=list(self.logprobs),
            versions=list(self.versions),
            finish_reason=self.finish_reason,
            text=self.text,
            reward=reward,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant's turn of a chat, and the messages that led to it."""

    messages: list[dict[str, Any]]
    generation: Generation

    @property
    def text(self) -> str:
        return self.generation.text

    @property
    def finish_reason(self) -> str:
        return self.generation.finish_reason

    def trajectory(self, reward: float | None = None) -> Trajectory:
        return self.generation.trajectory(reward)
