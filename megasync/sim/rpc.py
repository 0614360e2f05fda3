"""The buffer's actor as its callers see it: calls take time, overtake each other, and their answers may get lost.

As with a Ray actor, a caller that gives up does not take its call back; and a lost answer is asked for again with the
same call, which therefore may do its work once only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from megasync.sim.chance import Chance

CALL_SECONDS = 0.002


class DistantBuffer:
    """The methods of `AsyncBuffer`, each as a remote call. A call that fails although nobody waits for it is reported."""

    def __init__(self, buffer: Any, chance: Chance, on_orphan: Callable[[str, BaseException], None]) -> None:
        self._buffer = buffer
        self._chance = chance
        self._on_orphan = on_orphan
        self._calls: set[asyncio.Task] = set()

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._buffer, method)

        async def call(*args: Any) -> Any:
            about = f"{method} {args[0].uid if hasattr(args[0], 'uid') else args[0]}" if args else method
            await self._travel(about)
            while True:
                answer = await self._deliver(about, target, args)
                await self._travel(about)
                if method == "reclaim" or not self._chance.happens("answer is lost", about):
                    return answer

        return call

    async def _travel(self, about: str) -> None:
        await asyncio.sleep(self._chance.seconds("call", CALL_SECONDS, about))

    async def _deliver(self, about: str, target: Callable, args: tuple) -> Any:
        call = asyncio.create_task(target(*args), name=f"call {about}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._orphaned(about, done))
            raise

    def _orphaned(self, about: str, call: asyncio.Task) -> None:
        if not call.cancelled() and call.exception() is not None:
            self._on_orphan(about, call.exception())

    async def close_calls(self) -> None:
        """Ends the calls that nobody waits for any more."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
