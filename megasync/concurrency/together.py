"""Starting several parts at once, as one: all of them, or the error of the one that failed first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*starts: Coroutine[Any, Any, None]) -> None:
    """Runs all; when one fails the others are cancelled, and its own error is raised once they have ended."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
