"""Reward functions with names and weights: how the configuration refers to them, and how their scores are combined."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megasync.config.builtin import REWARDS
from megasync.errors import ConfigError
from megasync.importing import load_callable
from megasync.runs import FloatArray


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """`call(completions, **columns) -> list[float | None]`, sync or async; `name` appears in metrics and errors."""

    name: str
    call: Callable[..., Any]
    weight: float = 1.0

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    @property
    def keeps_own_deadlines(self) -> bool:
        """Whether the function bounds every wait itself, so that the runner must not count the time in its queue."""
        return bool(getattr(self.call, "keeps_own_deadlines", False))


def load_reward(reference: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The reward of a built-in name or of "package.module:function". Instantiates a class with `options`.

    Raises ConfigError.
    """
    return load_callable(REWARDS.get(reference, reference), options, reference)


def reward_functions(
    given: Callable[..., Any] | Mapping[Callable[..., Any], float] | Sequence[RewardFunction] | None,
) -> tuple[RewardFunction, ...]:
    """Normalises one function, several with weights, or none. Raises ConfigError for an invalid weight or name."""
    if given is None:
        functions = ()
    elif isinstance(given, Mapping):
        functions = tuple(RewardFunction(_short_name(call), call, float(weight)) for call, weight in given.items())
    elif callable(given):
        functions = (RewardFunction(_short_name(given), given),)
    else:
        functions = tuple(given)
    for function in functions:
        if not 0 < function.weight < float("inf"):
            raise ConfigError(
                f"the weight of the reward {function.name!r} is {function.weight}; it must be above 0 and finite. A "
                f"penalty is a function whose scores are negative"
            )
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            raise ConfigError(f"{count} reward functions have the name {name!r}; their metrics need different names")
    return functions


def combine(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    """The weighted sum of one response's scores, one per function; None if all scores are None.

    A None is left out: the weights of the other functions are scaled up so that the sum of weights stays the same. With
    s_i the scores and A the functions that returned one, the reward is sum(w) / sum_A(w) * sum_A(w_i s_i), which is the
    plain weighted sum if all of them did. `weights` are above 0.
    """
    present = [(weight, score) for weight, score in zip(weights, scores, strict=True) if score is not None]
    if not present:
        return None
    total = sum(weight * score for weight, score in present)
    if len(present) == len(weights):
        # Not scaled by a quotient that is 1 only up to rounding: equal scores must give exactly equal rewards.
        return total
    return total * sum(weights) / sum(weight for weight, _ in present)


def combine_tokens(weights: Sequence[float], scores: Sequence[float | FloatArray | None]) -> FloatArray | None:
    """The rewards of one response's tokens, weighted as by `combine`; None if no function scored tokens.

    A score is that of the response or of its tokens, then with NaN for tokens without one.
    """
    each = [(weight, score) for weight, score in zip(weights, scores, strict=True) if isinstance(score, np.ndarray)]
    if not each:
        return None
    present = sum(weight for weight, score in zip(weights, scores, strict=True) if score is not None)
    values = np.stack([np.float32(weight * sum(weights) / present) * score for weight, score in each])
    none = np.isnan(values).all(axis=0)
    return np.where(none, np.float32("nan"), np.nansum(values, axis=0)).astype(np.float32)


def _short_name(call: Callable[..., Any]) -> str:
    return str(getattr(call, "__name__", None) or type(call).__name__)
