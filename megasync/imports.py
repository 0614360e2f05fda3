"""Importing large packages without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Pauses garbage collection in this process, for a block that imports torch, SGLang or the like.

    Modules are made of many small objects, all of which stay. The collector walks over them again and again and finds
    nothing, which takes a quarter of the time of such an import; so it is told that they stay, and does not do it later
    either. Objects that are there already are still freed when nobody refers to them, but not cycles of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
