"""Workflows: plain `async def` functions that turn one sample into trajectories, and how to find one by its name.

A workflow is called as `rollout(client, sample)`. `sample` holds the row's columns, "prompt_ids" and, with a chat
template, "messages"; it is the workflow's own copy. It returns a Trajectory, or a list of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from megasync.buffer.trajectory import Trajectory
from megasync.errors import ConfigError

Workflow = Callable[[Any, dict[str, Any]], Awaitable[Trajectory | list[Trajectory]]]


async def single_turn(client: Any, sample: dict[str, Any]) -> Trajectory:
    """The default: one answer to the prompt, left to the reward function to score."""
    reply = await client.generate(sample["prompt_ids"])
    return reply.trajectory()


def load_function(reference: str) -> Callable[..., Any]:
    """The function that "package.module:function" names. Raises ConfigError saying which part is wrong."""
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{reference!r} does not name a function; write it as package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise ConfigError(f"{reference!r}: {module_name} needs the module {error.name!r}; install it") from error
        raise ConfigError(
            f"{reference!r}: there is no module {error.name!r}; check the name and that its folder is on PYTHONPATH"
        ) from error
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ConfigError(f"{reference!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{reference!r}: the module {module_name} has no {name!r}")
    if not callable(function):
        raise ConfigError(f"{reference!r} is a {type(function).__name__}, not a function")
    return function


def name_of(function: Callable[..., Any]) -> str:
    """A function's name for messages: with its module where it has one."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module and isinstance(name, str) and ":" not in name else str(name)
