"""What every policy loss gets, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megasync.algorithms.kl import MAX_LOG_RATIO
from megasync.algorithms.sequences import sequence_mean

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of one microbatch, float32 [tokens]; outside of ``keep`` all values are 0.

    A mean over these tokens would depend on the packing of a step. That of a sequence does not.
    """

    # Carries the gradient.
    logprobs: Tensor
    # The denominator of the ratio: the trainer's log-probs before the step, or the server's.
    old: Tensor
    advantages: Tensor
    # The trained tokens, bool.
    keep: Tensor
    # The sequence of each token, int64; every sequence is complete.
    segments: Tensor | None = None
    # The tokens that the loss treats apart, bool, if it chooses any: see `StepTokens`.
    chosen: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """``log pi - log pi_old``."""
        return self.logprobs - self.old

    @cached_property
    def ratio(self) -> Tensor:
        """``pi / pi_old``, finite."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    @property
    def chosen_tokens(self) -> Tensor:
        """The tokens of ``chosen`` that are kept. Raises ValueError if none were chosen before the step."""
        if self.chosen is None:
            raise ValueError("this loss needs `chosen`, the tokens of the whole minibatch that it treats apart")
        return self.chosen & self.keep

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean over the kept tokens of each token's sequence, [tokens]. Raises ValueError without segments."""
        if self.segments is None:
            raise ValueError("a loss of whole sequences needs `segments`, the sequence index of each token")
        return sequence_mean(values, self.keep, self.segments)


@dataclass(frozen=True)
class StepTokens:
    """A rank's trained tokens of one optimizer step, float64 [tokens], for a loss that chooses among all ranks'."""

    # Of the policy just before the step.
    logprobs: Floats
    # The denominators of the ratio.
    old: Floats
    advantages: Floats
    # As good as random, below 2^32; those of a token are the same whichever rank has it.
    random_keys: NDArray[np.uint64]
    # Returns the sums of its argument over all ranks: each rank must call it the same number of times, with arrays of
    # the same shape.
    summed: Callable[[Floats], Floats]


def random_keys(step: int, trajectories: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The random keys of tokens, from their trajectories in a step and their places in these; see `StepTokens`."""
    mixed = np.full(len(places), step, dtype=np.uint64)
    for part in (trajectories, places):
        # The finalizer of SplitMix64 (Steele et al. 2014, OOPSLA), in which numpy's overflows are intended.
        mixed = (mixed ^ part.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed >> np.uint64(32)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, and where a bound took its gradient or replaced its value: bool [tokens].

    ``dual_clipped`` is where the lower bound for negative advantages applied.
    """

    loss: Tensor
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None
