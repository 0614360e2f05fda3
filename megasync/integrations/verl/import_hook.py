"""Calls a function after the first import of a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Finder(MetaPathFinder):
    """A meta path finder for one module, which it finds as usual; calls ``then`` once the module is loaded."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._then()

            spec.loader.exec_module = exec_module
        return spec


def call_after_import(name: str, then: Callable[[], object]) -> None:
    """Calls ``then`` at the end of the first import of a module, or now if it is already imported.

    An exception of ``then`` propagates to the importer of the module.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))
