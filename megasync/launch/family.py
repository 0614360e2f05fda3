"""Processes below one that was started here: who they are, and the end of those that stay behind."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil


def children_of(pid: int) -> list[psutil.Process]:
    """All below this process, at any depth; none when it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_all(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Returns when they have ended; those that have not after so many seconds are killed.

    A process is told from a later one with its id by when it began.
    """
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=seconds)
