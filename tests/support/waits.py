"""A wait for what has no event of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 60.0


async def until(holds: Callable[[], object]) -> None:
    """Returns once the condition holds. Raises TimeoutError after a minute."""
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.002)
