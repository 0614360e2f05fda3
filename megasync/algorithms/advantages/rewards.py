"""The rewards of one training step, as every advantage estimator gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepRewards:
    """All responses of a step that have a reward, as arrays [responses].

    ``groups`` are ascending: responses with the same number answer the same prompt. ``tokens`` are numbers of trained
    tokens. Rewards are finite. ``parts`` are the scores of each of several reward functions, by name, and NaN where a
    function gave none; ``weights`` are theirs. Without several functions both are empty. ``log_ratios`` are
    sums over the trained tokens of the log-ratio of policy and reference, for estimators that say so; None before they
    are known. ``baselines`` are the rewards of the greedy responses to the prompts, for estimators that say so.
    """

    rewards: Floats
    groups: Ints
    tokens: Ints
    parts: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    log_ratios: Floats | None = None
    baselines: Floats | None = None

    def each_group(self) -> Iterator[slice]:
        """The responses of each prompt."""
        starts = np.flatnonzero(np.diff(self.groups, prepend=-1))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(self.groups)], strict=True):
            yield slice(start, end)

    def whitened(self, values: Floats) -> Floats:
        """Values of responses, shifted and scaled to mean 0 and variance 1 over all trained tokens of the step.

        The variance is the unbiased one, of tokens that carry their response's value.
        """
        count = int(self.tokens.sum())
        if count < 2:
            return values - (values @ self.tokens) / max(1, count)
        centred = values - (values @ self.tokens) / count
        variance = (centred**2 @ self.tokens) / (count - 1)
        return centred / np.sqrt(variance + WHITEN_EPS)


@dataclass(frozen=True)
class TokenRewards:
    """The trained tokens of this rank's responses of a step, one response after another; arrays [tokens].

    Those of response i are from ``starts[i]`` up to ``starts[i + 1]``; it answers prompt ``groups[i]``.
    ``rewards`` are 0 where ``rewarded`` is false; those of a response sum up to its reward. ``values`` are a critic's
    of the text before each token, 0 without one. ``longest`` are the most trained tokens of a response to each prompt.
    ``squared_norms`` are those of the gradients of the tokens' log-probs by their logits, 1 - 2 p + sum(p^2), for
    estimators that say so. ``summed`` returns the sums of its argument over all ranks: each rank
    must call it the same number of times, with arrays of the same shape.
    """

    rewards: Floats
    values: Floats
    starts: Ints
    rewarded: NDArray[np.bool_]
    groups: Ints
    longest: Ints
    summed: Callable[[Floats], Floats]
    squared_norms: Floats | None = None

    def by_group(self, values: Floats, groups: Ints) -> Floats:
        """The sums of values by their groups, [prompts]."""
        return np.bincount(groups, values, len(self.longest)).astype(np.float64)


# Added to the variance.
WHITEN_EPS = 1e-8
