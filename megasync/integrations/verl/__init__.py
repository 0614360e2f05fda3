"""megasync as a verl engine. verl imports this package in each of its processes, through its entry point.

Most of these processes compute nothing, so the engine is imported, and registers itself, only where verl's own engines
are. verl swallows exceptions of plugins; but a configuration that names `MegasyncEngineConfig` repeats the import and
raises, and `megasync doctor` tries it in a fresh interpreter.
"""

from importlib import import_module
from typing import Any

from megasync.integrations.verl_versions import check_version

check_version()

# Without verl these imports fail, hence the check above.
from megasync.integrations.verl.import_hook import call_after_import  # noqa: E402
from megasync.integrations.verl.platform import CpuPlatform  # noqa: E402

# Must precede the import of verl's engines, which query the platform.
CpuPlatform.install()

MODULES = {"MegasyncEngine": "engine", "MegasyncEngineConfig": "config", "MegasyncValueEngine": "engine"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(MODULES)}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


call_after_import("verl.workers.engine", lambda: import_module(f"{__name__}.engine"))
