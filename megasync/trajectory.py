"""Trajectories, prompts and groups: what rollouts produce and training steps consume. Plain data: no torch, no Ray.

Invariant: all per-token lists of a ``Trajectory`` have the length of ``response_ids``; ``__post_init__`` checks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled response, token for token as the server produced it.

    ``loss_mask`` is 0 for tokens that the policy did not generate (tool output, injected text). ``logprobs`` are those
    of the behaviour policy, ``versions`` the published weight version that sampled each token; the server reports both.
    ``reward`` is None until the trajectory is scored, and remains None if the reward function declines to score it.
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
        """Returns the trajectory with tokens older than version ``least`` masked out of the loss."""
        if self.oldest_version is None or self.oldest_version >= least:
            return self
        mask = [m if v >= least else 0 for m, v in zip(self.loss_mask, self.versions, strict=True)]
        return replace(self, loss_mask=mask)


@dataclass(frozen=True, slots=True)
class Partial:
    """The tokens generated so far of one response; lists are per token.

    ``request_digest`` identifies the prompt and the sampling parameters: only a request with the same digest can
    continue the response. A ``finish_reason`` other than "abort" means that the response is complete.
    """

    request_digest: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str = "abort"  # "stop" or "length" when complete
    text: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A dataset row as a tokenized prompt.

    ``uid`` is unique across epochs and restarts (``"<epoch>:<row>"``). ``columns`` are the row's other fields, passed
    to the reward function as keyword arguments.
    """

    uid: str
    prompt_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """The scored trajectories of one prompt: the unit that is admitted, leased and trained."""

    uid: str
    trajectories: list[Trajectory]

    @property
    def oldest_version(self) -> int | None:
        """The smallest version among trained tokens of all trajectories; None when no token is trained."""
        return min((v for t in self.trajectories if (v := t.oldest_version) is not None), default=None)


def finite_float(value: Any) -> float | None:
    """The value as a float, or None if it is not a finite real number. Never raises.

    For rewards and metrics from users' code. Accepts Python's numbers and bools and scalars of NumPy and torch. Text is
    not a number, even if it spells one.
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return None
    return number if math.isfinite(number) else None
