"""megasync as an engine of verl, which imports this package in each of its processes, by its entry point.

Most of them compute nothing. So the engine is loaded, and registers itself, only where verl's own engines are. verl swallows
whatever a plugin raises; but the same import happens again, aloud, when a configuration names `MegasyncEngineConfig`, and
`megasync doctor` tries it in a fresh interpreter.
"""

from importlib import import_module
from typing import Any

from megasync.integrations.verl_versions import check_version

check_version()

from megasync.integrations.verl.after_import import after_import
from megasync.integrations.verl.platform import CpuPlatform

# Before verl's engines are imported, which ask for the platform.
CpuPlatform.install()

MODULES = {"MegasyncEngine": "engine", "MegasyncEngineConfig": "config", "MegasyncValueEngine": "engine"}

__all__ = ["CpuPlatform", "MegasyncEngine", "MegasyncEngineConfig", "MegasyncValueEngine"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


after_import("verl.workers.engine", lambda: import_module(f"{__name__}.engine"))
