"""The protocol of an environment, and how the configuration refers to one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from megasync.confidential import masked
from megasync.config.builtin import ENVIRONMENTS
from megasync.errors import ConfigError
from megasync.importing import load_function


class Step(NamedTuple):
    """The result of an action. A plain tuple in this order is also accepted."""

    observation: str
    reward: float
    done: bool


class Environment(Protocol):
    """Plays one episode at a time. The methods are either all sync or all async.

    `reset` starts an episode, even if the previous one did not finish. An episode must depend only on the sample and
    the actions, so that the episodes of a group are comparable.
    """

    def reset(self, sample: dict[str, Any]) -> str:
        """Starts the episode of a dataset row and returns the first observation."""
        ...

    def step(self, action: str) -> Step:
        """Applies the model's text as an action. An invalid action is reported by the observation, not as an error."""
        ...

    def close(self) -> None: ...


def environment_factory(kind: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """A factory for a built-in kind or for "package.module:Class". Raises ConfigError, also for invalid options."""
    factory = load_function(ENVIRONMENTS.get(kind, kind))
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(factory, name, None))]
    if missing:
        raise ConfigError(f"the environment {kind!r} has no {', '.join(missing)}; it needs reset, step and close")
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ConfigError(f"the environment {kind!r} rejects its options {masked(options)}: {error}") from error
    return partial(factory, **options)
