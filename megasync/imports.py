"""Importing large packages without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pauses garbage collection in this process, for a block that imports torch, SGLang or the like.

    Modules are made of many small objects, all of which stay. The collector walks over them again and again and finds
    nothing: a third of the time that such an import takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
