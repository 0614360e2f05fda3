"""What every policy loss gets, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megasync.algorithms.kl import MAX_LOG_RATIO
from megasync.algorithms.sequences import sequence_mean


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of one microbatch, float32 [tokens]; outside of ``keep`` (bool [tokens]) all values are 0.

    ``logprobs`` carries the gradient. ``old`` is the denominator of the ratio: the trainer's log-probs before the step,
    or the server's. ``segments`` (int64 [tokens]) is the sequence of each token; every sequence is complete.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    keep: Tensor
    segments: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """``log pi - log pi_old``."""
        return self.logprobs - self.old

    @cached_property
    def ratio(self) -> Tensor:
        """``pi / pi_old``, finite."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the kept tokens."""
        return torch.where(self.keep, values, 0.0).sum() / self.keep.sum().clamp(min=1)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean over the kept tokens of each token's sequence, [tokens]. Raises ValueError without segments."""
        if self.segments is None:
            raise ValueError("a loss of whole sequences needs `segments`, the sequence index of each token")
        return sequence_mean(values, self.keep, self.segments)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, and where a bound took its gradient or replaced its value: bool [tokens].

    ``dual_clipped`` is where the lower bound for negative advantages applied.
    """

    loss: Tensor
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None
