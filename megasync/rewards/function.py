"""Reward functions with names and weights: how the configuration refers to them, and how their scores are combined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megasync.base.importing import load_callable, name_of
from megasync.concurrency.foreign import is_async, shown
from megasync.config.builtin import REWARDS
from megasync.errors import ConfigError
from megasync.rewards.convention import SHAPES, Convention, convention_of
from megasync.trajectory.runs import FloatArray


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function that scores a group, sync or async; `name` appears in metrics and errors.

    `convention` says how it is called. Raises ConfigError for a function that cannot be called so.
    """

    name: str
    call: Callable[..., Any]
    weight: float = 1.0
    convention: Convention = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "convention", convention_of(self.call))

    @property
    def is_async(self) -> bool:
        return is_async(self.call)

    @property
    def needs_main_thread(self) -> bool:
        """Whether the function can keep its deadlines on a main thread only, which a worker process has."""
        return bool(getattr(self.call, "needs_main_thread", False))

    @property
    def keeps_own_deadlines(self) -> bool:
        """Whether the function bounds every wait itself, so that the runner must not count the time in its queue."""
        return bool(getattr(self.call, "keeps_own_deadlines", False))


def load_reward(reference: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The reward of a built-in name or of "package.module:function". Instantiates a class with `options`.

    Raises ConfigError.
    """
    return load_callable(REWARDS.get(reference, reference), options, reference)


# A function, or how the configuration would name it.
Named = Callable[..., Any] | str
# One, several, or several with weights: what `reward=` takes.
Given = Named | Mapping[Named, float] | Sequence[Named | tuple[Named, float] | RewardFunction] | RewardFunction


def reward_functions(reward: Given | None) -> tuple[RewardFunction, ...]:
    """Normalises one function, several, or several with weights; each may be a name, as in the configuration.

    Raises ConfigError for one that cannot be loaded or called, and for an invalid weight or name.
    """
    if reward is None:
        return ()
    if isinstance(reward, Mapping):
        items: Sequence[Any] = list(reward.items())
    else:
        items = list(reward) if isinstance(reward, list | tuple) else [reward]
    functions = tuple(map(_function, items))
    if not functions:
        raise ConfigError(f"reward={shown(reward)} names no function; pass one, or None if the workflow sets rewards")
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


def check_columns(functions: Sequence[RewardFunction], columns: Collection[str], rows: str) -> None:
    """Raises ConfigError for a function that requires a column that no row has. `rows` names them."""
    for function in functions:
        if missing := function.convention.missing(columns):
            raise ConfigError(
                f"the reward function {name_of(function.call)} requires {', '.join(missing)}, but {rows} has the "
                f"columns {', '.join(sorted(columns))}; add the column, give the parameter a default, or {SHAPES}"
            )


def _function(item: Any) -> RewardFunction:
    if isinstance(item, RewardFunction):
        return item
    call, weight = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
    if isinstance(call, str):
        call = load_reward(call)
    if not callable(call):
        raise ConfigError(
            f"reward={shown(item)} is not a function, a name such as 'package.module:function', or a list "
            f"or dictionary of these with weights"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"the weight of the reward {_short_name(call)!r} is {shown(weight)}, which is no number")
    return RewardFunction(_short_name(call), call, float(weight))


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
    # A partial is called as what it fills in.
    call = getattr(call, "func", call)
    return str(getattr(call, "__name__", None) or type(call).__name__)
