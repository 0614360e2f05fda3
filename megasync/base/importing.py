"""Fast imports of large packages, and functions loaded by their `package.module:function` names."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megasync.base.confidential import masked
from megasync.concurrency.foreign import ForeignExit, explain, invoke
from megasync.errors import ConfigError, raised_as


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pauses garbage collection in this process while the block imports torch, SGLang or similar packages.

    Modules consist of many small objects that are never freed. The collector scans them repeatedly, which takes a
    quarter of the import time. So it is paused, and afterwards all existing objects are frozen: reference counting
    still frees them, but reference cycles among them are no longer collected.
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
    """Loads the function named by "package.module:function". Raises ConfigError that says which part is wrong."""
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{reference!r} does not name a function; write it as package.module:function")
    try:
        # A module may also have a __getattr__ of its own.
        function = invoke(lambda: getattr(importlib.import_module(module_name), name, None))
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise ConfigError(f"{reference!r}: {module_name} needs the module {error.name!r}; install it") from error
        raise ConfigError(
            f"{reference!r}: there is no module {error.name!r}; check the name and that its folder is on PYTHONPATH"
        ) from error
    except Exception as error:  # a user's module may raise anything
        fix = "; put what the module runs as a program below `if __name__ == '__main__':`"
        raise ConfigError(
            f"{reference!r}: importing {module_name} failed: {explain(error)}"
            f"{fix if isinstance(error, ForeignExit) else ''}"
        ) from error
    if function is None:
        raise ConfigError(f"{reference!r}: the module {module_name} has no {name!r}")
    if not callable(function):
        raise ConfigError(f"{reference!r} is a {type(function).__name__}, not a function")
    return function


def keyword_options(function: Callable[..., Any]) -> list[str]:
    """The names of its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.items()
    return [name for name, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def load_callable(
    reference: str, options: Mapping[str, Any] | None = None, written: str | None = None
) -> Callable[..., Any]:
    """The function named by "package.module:function", or an instance of the class named so, made with `options`.

    Errors show `written`, by default the reference. Raises ConfigError, also for options that the class does not accept
    and for options of a function.
    """
    loaded, shown, arguments = load_function(reference), written or reference, dict(options or {})
    if not inspect.isclass(loaded):
        if arguments:
            raise ConfigError(
                f"{shown!r} is a function, which takes no options ({masked(arguments)}); "
                f"name a class whose instances are called"
            )
        return loaded
    made: Any = loaded
    try:
        instance = invoke(made, **arguments)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"{shown!r} does not accept its options {masked(arguments)}: {error}") from error
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"{shown!r} cannot be made with its options {masked(arguments)}: {explain(error)}") from error
    if not callable(instance):
        raise ConfigError(f"the instances of {shown!r} cannot be called; give the class a method __call__")
    return instance


def check_call(function: Callable[..., Any], problem: str, *arguments: Any, **keywords: Any) -> None:
    """Raises ConfigError with this problem for a function that cannot be called with these arguments.

    One whose signature cannot be read, such as a function in C, passes.
    """
    try:
        signature = invoke(inspect.signature, function)
    except (TypeError, ValueError):
        return
    with raised_as(ConfigError, problem, of=TypeError):
        signature.bind(*arguments, **keywords)


def name_of(function: Callable[..., Any]) -> str:
    """A function's name for messages, qualified by its module if it has one."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module and isinstance(name, str) and ":" not in name else str(name)
