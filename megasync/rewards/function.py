"""Reward functions with their names and weights, and how the configuration refers to them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasync.config.builtin import REWARDS
from megasync.errors import ConfigError
from megasync.importing import load_function


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
    found = load_function(REWARDS.get(reference, reference))
    if inspect.isclass(found):
        made: Any = found
        try:
            return made(**(options or {}))
        except TypeError as error:
            raise ConfigError(f"the reward {reference!r} refuses its options {dict(options or {})}: {error}") from error
    if options:
        raise ConfigError(
            f"the reward {reference!r} is a function, which takes no options ({dict(options)}); name a class whose "
            f"instances are called as f(completions, **columns)"
        )
    return found


def reward_functions(
    given: Callable[..., Any] | Mapping[Callable[..., Any], float] | Sequence[RewardFunction] | None,
) -> tuple[RewardFunction, ...]:
    """Normalises one function, several with weights, or none. Raises ConfigError for an invalid weight or name."""
    if given is None:
        found = ()
    elif isinstance(given, Mapping):
        found = tuple(RewardFunction(_short_name(call), call, float(weight)) for call, weight in given.items())
    elif callable(given):
        found = (RewardFunction(_short_name(given), given),)
    else:
        found = tuple(given)
    for function in found:
        if not 0 < function.weight < float("inf"):
            raise ConfigError(
                f"the weight of the reward {function.name!r} is {function.weight}, and must be above 0 and finite; a "
                f"penalty is a function whose scores are negative"
            )
    for name, count in Counter(function.name for function in found).items():
        if count > 1:
            raise ConfigError(
                f"{count} reward functions are called {name!r}, so their metrics would collide; rename some"
            )
    return found


def _short_name(call: Callable[..., Any]) -> str:
    return str(getattr(call, "__name__", None) or type(call).__name__)
