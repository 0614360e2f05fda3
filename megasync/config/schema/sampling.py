"""The section of how training rollouts are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SamplingConfig:
    """How training rollouts are sampled."""

    # Temperature of training rollouts, at which the trainer scores them.
    temperature: float = 1.0
    # Only 1 (all tokens): the trainer scores the whole distribution. Evaluation may truncate by `eval.sampling.top_p`.
    top_p: float = 1.0
    # Only -1 (all tokens): the trainer scores the whole distribution. Evaluation may truncate by `eval.sampling.top_k`.
    top_k: int = -1
    # Longest response, in tokens.
    max_new_tokens: int = 256
    # Texts that end a response.
    stop: list[str] = field(default_factory=list)
