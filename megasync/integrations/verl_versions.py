"""The verl versions that the plugin supports. Outside the plugin's package, which cannot be imported without verl."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megasync.errors import ConfigError

# verl announces that its engine interface will change; every version here is tested.
SUPPORTED = ("0.9.1",)


def check_version() -> str:
    """The installed version of verl. Raises ConfigError if verl is not installed, or its version is not supported."""
    supported = " or ".join(SUPPORTED)
    try:
        installed = version("verl")
    except PackageNotFoundError:
        raise ConfigError(f"megasync's verl plugin needs verl {supported}, which is not installed") from None
    if installed not in SUPPORTED:
        raise ConfigError(
            f"megasync's verl plugin needs verl {supported}, but {installed} is installed; install verl=={supported}"
        )
    return installed
