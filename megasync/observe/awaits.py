"""A text dump of what every asyncio task is waiting for: the first thing to look at when a run hangs.

The stack of a suspended task shows only its outermost frame, so this module follows the chain of awaits itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

# Innermost frames of a chain that are shown; they say what the task waits for.
SHOWN_FRAMES = 5
# A chain is a handful of awaits; a longer one must be a cycle.
MAX_CHAIN = 100


def describe_tasks(tasks: Iterable[asyncio.Task[Any]] | None = None) -> str:
    """One line for all tasks that wait at the same place: number, kind, and the chain of awaits, outermost first."""
    places: Counter[tuple[str, str]] = Counter()
    for task in asyncio.all_tasks() if tasks is None else tasks:
        # Names of group and sample tasks end in numbers; the first word is their kind.
        kind = task.get_name().split()[0]
        places["task" if kind.startswith("Task-") else kind, _chain(task.get_coro())] += 1
    return "\n".join(f"{count:4d} x {kind}: {chain}" for (kind, chain), count in sorted(places.items()))


def _chain(coroutine: Any) -> str:
    frames: list[str] = []
    awaited = coroutine
    for _ in range(MAX_CHAIN):
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
