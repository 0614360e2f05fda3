"""What a rollout leaves behind, and what a training step consumes. Plain data: no torch, no Ray.

Invariant: all per-token lists of a ``Trajectory`` have the length of ``response_ids``; ``__post_init__`` guarantees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled response, token for token as the server produced it.

    ``loss_mask`` is 0 on tokens that the policy did not write (tool output, injected text). ``logprobs`` are the
    behaviour policy's, ``versions`` the published weight version that sampled each token; both come from the server's
    own report. ``reward`` is None until scored, or when the reward function declined to score it.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str = "stop"  # "stop", "length" or "abort"
    text: str = ""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a trajectory needs at least one prompt token")
        n = len(self.response_ids)
        for name in ("loss_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {n} response tokens")

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among trained tokens; None when no token is trained."""
        return min(compress(self.versions, self.loss_mask), default=None)

    def masked(self, least: int) -> Trajectory:
        """The same trajectory with tokens older than version ``least`` left out of the loss."""
        if self.oldest_version is None or self.oldest_version >= least:
            return self
        mask = [m if v >= least else 0 for m, v in zip(self.loss_mask, self.versions, strict=True)]
        return replace(self, loss_mask=mask)


@dataclass(frozen=True, slots=True)
class Partial:
    """What is generated of one response so far; lists are per token.

    ``request_digest`` is of the prompt and the sampling parameters: a workflow that asks something else this time cannot
    go on from here. A ``finish_reason`` other than "abort" says that the response is complete: nothing is sampled behind
    its last token.
    """

    request_digest: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str = "abort"  # "stop" or "length" when it is complete
    text: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row on its way to the servers.

    ``uid`` is unique across epochs and restarts (``"<epoch>:<row>"``). ``columns`` are the row's other fields, handed
    to the reward function as keyword arguments.
    """

    uid: str
    prompt_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """All scored trajectories of one prompt: the unit that is admitted, leased and trained."""

    uid: str
    trajectories: list[Trajectory]

    @property
    def oldest_version(self) -> int | None:
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)
