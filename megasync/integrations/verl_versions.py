"""Which verl the plugin is for. Outside its package, which cannot be imported without verl."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from megasync.errors import ConfigError

# verl's engine interface is declared to change; each version here has been tested.
SUPPORTED = ("0.9.1",)


def check_version() -> str:
    """The installed version of verl.

    Raises:
        ConfigError: verl is missing, or of a version that this plugin does not know.
    """
    wanted = " or ".join(SUPPORTED)
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise ConfigError(f"megasync's verl plugin needs verl {wanted}, and none is installed") from None
    if found not in SUPPORTED:
        raise ConfigError(
            f"megasync's verl plugin is for verl {wanted}, and {found} is installed; install verl=={wanted}"
        )
    return found
