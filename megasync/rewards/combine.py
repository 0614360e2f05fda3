"""From the scores of several reward functions to one reward. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def combine(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    """The weighted sum of one response's scores, one of each function; None when no function gave one.

    A None takes no part: the weights of those that answered are scaled up so that they sum to what all of them sum to.
    With s_i the scores and A the functions that answered, the reward is sum(w) / sum_A(w) * sum_A(w_i s_i), which is the
    plain weighted sum when all of them did. `weights` are above 0.
    """
    answered = [(weight, score) for weight, score in zip(weights, scores, strict=True) if score is not None]
    if not answered:
        return None
    total = sum(weight * score for weight, score in answered)
    if len(answered) == len(weights):
        # Not scaled by a quotient that is 1 up to rounding: equal scores must give exactly equal rewards.
        return total
    return total * sum(weights) / sum(weight for weight, _ in answered)
