"""megasync: fully asynchronous reinforcement learning for large language models.

    import megasync

    megasync.AsyncTrainer("configs/quickstart.yaml", reward=my_reward).train()

Heavy packages are imported only when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from megasync.base.importing import quick_imports

if TYPE_CHECKING:
    from megasync.app.async_trainer import AsyncTrainer
    from megasync.app.run import RunResult
    from megasync.config import Config
    from megasync.errors import MegasyncError
    from megasync.service.app import LocalService as Service
    from megasync.trajectory import Trajectory

    __version__: str

# The module of each public name, and its name there if that is another.
_PUBLIC = {
    "AsyncTrainer": "megasync.app.async_trainer",
    "Config": "megasync.config",
    "MegasyncError": "megasync.errors",
    "RunResult": "megasync.app.run",
    "Service": "megasync.service.app:LocalService",
    "Trajectory": "megasync.trajectory",
}

__all__ = ["AsyncTrainer", "Config", "MegasyncError", "RunResult", "Service", "Trajectory"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("megasync")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megasync' has no attribute {name!r}")
    module, _, there = _PUBLIC[name].partition(":")
    with quick_imports():
        return getattr(import_module(module), there or name)
