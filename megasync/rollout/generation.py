"""What one generation brought back: tokens with the log-prob and the weight version that each was sampled under.

Invariant: `token_ids`, `logprobs` and `versions` have one entry per sampled token, in order, over all parts of an
interrupted generation; `parse_part` refuses an answer that has not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megasync.buffer.trajectory import Trajectory
from megasync.errors import ServerError


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


@dataclass(slots=True)
class Parts:
    """A generation while it grows, part by part."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str = "abort"

    def add(self, answer: dict[str, Any]) -> int:
        """Takes one answer of `/generate`; returns how many tokens it brought. Raises ServerError for a malformed one."""
        try:
            meta = answer["meta_info"]
            sampled = meta.get("output_token_logprobs") or []
            versions = token_versions(meta, len(sampled))
            self.logprobs += [entry[0] for entry in sampled]
            self.token_ids += [entry[1] for entry in sampled]
            self.finish_reason = meta["finish_reason"]["type"]
        except (KeyError, TypeError, IndexError) as error:
            raise ServerError(f"a /generate answer without {error!r}: {str(answer)[:500]}") from error
        self.versions += versions
        self.texts.append(answer.get("text") or "")
        return len(sampled)


def token_versions(meta: dict[str, Any], count: int) -> list[int]:
    """The weight version of each of `count` tokens, from the server's own spans. Raises ServerError for a gap."""
    versions: list[int] = []
    for span in meta.get("weight_versions") or []:
        if span["start"] != len(versions):
            break
        try:
            version = int(span["version"])
        except ValueError:
            raise ServerError(
                f"weight version {span['version']!r} is not an integer; start the server with --weight-version 0"
            ) from None
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ServerError(f"weight_versions {meta.get('weight_versions')} do not cover {count} tokens")
    return versions
