"""What every asyncio task waits for at this moment, as text: the first question about a run that stands still.

A suspended task's own stack shows its outermost frame only; the chain of awaits below it is followed here by hand.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

# Frames at the inner end of a chain that are shown; what a task waits for is there.
SHOWN_FRAMES = 5
# A chain is a handful of awaits; more can only be a cycle.
LONGEST_CHAIN = 100


def describe_tasks(tasks: Iterable[asyncio.Task[Any]] | None = None) -> str:
    """One line for all tasks that wait at the same place: how many, their names, and the awaits from outside in."""
    places: Counter[tuple[str, str]] = Counter()
    for task in asyncio.all_tasks() if tasks is None else tasks:
        # Groups and samples are numbered in their names; their kind is the first word.
        kind = task.get_name().split()[0]
        places["task" if kind.startswith("Task-") else kind, _chain(task.get_coro())] += 1
    return "\n".join(f"{count:4d} x {kind}: {chain}" for (kind, chain), count in sorted(places.items()))


def _chain(coroutine: Any) -> str:
    frames: list[str] = []
    awaited = coroutine
    for _ in range(LONGEST_CHAIN):
        frame, inner = _frame(awaited)
        if frame is None:
            break
        frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = inner
    shown = [*(["..."] if len(frames) > SHOWN_FRAMES else []), *frames[-SHOWN_FRAMES:]]
    return " > ".join(shown) or "not started"


def _frame(awaited: Any) -> tuple[FrameType | None, Any]:
    """The frame of a coroutine or generator, and what it awaits; (None, None) for anything else."""
    for prefix, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        if hasattr(awaited, f"{prefix}_frame"):
            return getattr(awaited, f"{prefix}_frame"), getattr(awaited, inner)
    return None, None
