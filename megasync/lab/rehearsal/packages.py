"""Finds the packages of launch/rehearsal.lock, which stand outside Python's path."""

from __future__ import annotations

import sys
from pathlib import Path

from megasync.errors import ConfigError

# Each in a folder NAME-VERSION of its own.
FOLDER = Path(sys.prefix) / "rehearsal"
COMMAND = "megasync install rehearsal"


def add_to_path(name: str, version: str) -> None:
    """Makes this process import package ``name`` from its folder, before any installed version of it.

    Raises ConfigError if the folder does not exist, or if modules of the package are imported already.
    """
    folder = FOLDER / f"{name}-{version}"
    if not folder.is_dir():
        raise ConfigError(f"{name} {version} is not in {FOLDER}; run `{COMMAND}`")
    if str(folder) in sys.path:
        return
    for module in (path.name for path in folder.iterdir() if path.suffix != ".dist-info" and path.is_dir()):
        if module in sys.modules:
            raise ConfigError(f"{module} was imported before {name} {version} was chosen; choose it first")
    sys.path.insert(0, str(folder))
