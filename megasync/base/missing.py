"""The errors for packages and programs that the environment lacks, with the command that installs them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from megasync.base.shipped import LOCKS
from megasync.errors import ConfigError, MegasyncError

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


def require_extra(
    extra: str, package: str, who: str, otherwise: str = "", kind: type[MegasyncError] = ConfigError
) -> None:
    """Raises an error of this kind if a package of an extra is missing. `who` needs it; `otherwise` is another fix."""
    if find_spec(package) is None:
        locked = (LOCKS / f"{extra}.lock").is_file()
        command = f"megasync install {extra}" if locked else f"pip install 'megasync[{extra}]'"
        raise kind(
            f"{who} needs the package {package}, which is not installed; install the extra `{extra}` (`{command}`)"
            f"{otherwise}"
        )


def apart_program(name: str, program: str) -> Path:
    """A program of an environment that lies beside the run's. Raises ConfigError if that is not installed."""
    path = Path(sys.prefix) / name / "bin" / program
    if not path.exists():
        raise ConfigError(f"there is no {path}; run `megasync install {name}`")
    return path
