"""What an environment is, and how one is found by what the configuration calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from megasync.config.builtin import ENVIRONMENTS
from megasync.errors import ConfigError
from megasync.importing import load_function


class Step(NamedTuple):
    """What an action led to. A plain tuple in this order will do."""

    observation: str
    reward: float
    done: bool


class Environment(Protocol):
    """One at a time: `reset` begins an episode, whatever became of the last one. All three sync, or all three async.

    An episode may depend on nothing but the sample and the actions, so that a group's episodes can be compared.
    """

    def reset(self, sample: dict[str, Any]) -> str:
        """Begins the episode of a dataset row; the first observation."""

    def step(self, action: str) -> Step:
        """What the model's text leads to. An action that makes no sense is an observation that says so, not an error."""

    def close(self) -> None: ...


def environment_factory(kind: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Makes environments of a ready kind or of "package.module:Class". Raises ConfigError, also for refused options."""
    found = load_function(ENVIRONMENTS.get(kind, kind))
    missing = [name for name in ("reset", "step", "close") if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(f"the environment {kind!r} has no {', '.join(missing)}; it needs reset, step and close")
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(f"the environment {kind!r} refuses its options {dict(options)}: {error}") from error
    return partial(found, **options)
