"""Importing large packages quickly, and finding functions by the names that configurations give them."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megasync.errors import ConfigError


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pauses garbage collection in this process, for a block that imports torch, SGLang or the like.

    Modules are made of many small objects, all of which stay. The collector walks over them again and again and finds
    nothing, which takes a quarter of the time of such an import; so it is told that they stay, and does not do it later
    either. Objects that are there already are still freed when nobody refers to them, but not cycles of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


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
