"""Combines the scores of several reward functions into one reward. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def combine(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    """The weighted sum of one response's scores, one per function; None if all scores are None.

    A None is left out: the weights of the other functions are scaled up so that the sum of weights stays the same. With
    s_i the scores and A the functions that returned one, the reward is sum(w) / sum_A(w) * sum_A(w_i s_i), which is the
    plain weighted sum if all of them did. `weights` are above 0.
    """
    answered = [(weight, score) for weight, score in zip(weights, scores, strict=True) if score is not None]
    if not answered:
        return None
    total = sum(weight * score for weight, score in answered)
    if len(answered) == len(weights):
        # Not scaled by a quotient that is 1 only up to rounding: equal scores must give exactly equal rewards.
        return total
    return total * sum(weights) / sum(weight for weight, _ in answered)
