"""The error for a package that a command needs and the environment lacks, with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

from megasync.errors import ConfigError

# Modules that `pip install megasync` does not bring, because a run needs them in exact versions.
OF_RUNS = ("torch", "ray", "megatron", "sglang", "sglang_router")
FIX = "run `megasync install cpu`, or `megasync install gpu` for machines with GPUs"


def fix_for_module(module: str | None) -> str | None:
    """How a module is installed that could not be imported; None if it is none of a run's packages."""
    package = (module or "").partition(".")[0]
    return f"{package} is not installed in this environment; {FIX}" if package in OF_RUNS else None


def require(*modules: str) -> None:
    """Raises ConfigError, with the command that installs them, if one of the packages is missing."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise ConfigError(f"not installed in this environment: {', '.join(missing)}; {FIX}")
