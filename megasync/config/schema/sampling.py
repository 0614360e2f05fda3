"""The section of how training rollouts are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SamplingConfig:
    """How training rollouts are sampled."""

    # Temperature of training rollouts.
    temperature: float = 1.0
    # Sample from the most probable tokens of this total probability; 1 takes all.
    top_p: float = 1.0
    # Sample from this many most probable tokens; -1 takes all.
    top_k: int = -1
    # Longest response, in tokens.
    max_new_tokens: int = 256
    # Texts that end a response.
    stop: list[str] = field(default_factory=list)
