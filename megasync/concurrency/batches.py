"""Work that many tasks hand to one thread: whatever comes while it works is its next batch.

Invariant: batches run one at a time, and items in the order in which they were put.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Calls a function beside the event loop and returns its result.
Run = Callable[[Callable[[], Any]], Awaitable[Any]]


class Batches(Generic[Item, Result]):
    """Calls ``work`` with each batch of items, on the event loop: it returns what the thread is to do with them.

    That returns one result for each item, or raises for all of them. ``run`` replaces the thread, called ``name``.
    """

    def __init__(
        self, work: Callable[[list[Item]], Callable[[], Sequence[Result]]], name: str, run: Run | None = None
    ) -> None:
        self._work = work
        self._thread = ThreadPoolExecutor(1, name)
        self._run = run or self._in_thread
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._working: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a batch runs or waits."""
        return self._working is not None and not self._working.done()

    def put(self, item: Item) -> asyncio.Future[Result]:
        """Adds an item to the next batch. Its result does not depend on whether anybody waits for it."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if not self.busy:
            self._working = asyncio.create_task(self._work_off(), name="batches")
        return result

    async def close(self) -> None:
        """Waits for everything that was put, and ends the thread."""
        if self._working is not None:
            await asyncio.wait([self._working])
        self._thread.shutdown()

    async def _work_off(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await self._run(self._work([item for item, _ in batch]))
            except Exception as error:  # noqa: BLE001 - whatever it is, each caller gets it
                for _, result in batch:
                    if not result.done():
                        result.set_exception(error)
                        # A caller that was cancelled does not retrieve it.
                        result.exception()
                continue
            for (_, result), value in zip(batch, results, strict=True):
                if not result.done():
                    result.set_result(value)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
