"""Automatic batching: single requests gather until there are `max_batch` of them or the first has waited `max_wait`.

One batch is worked on at a time, and the next gathers meanwhile: under load batches grow by themselves. Invariant:
every item that was taken ends in its own result or its own error; `_answer` guarantees it, trying a failed batch item
by item, so that one bad request costs the others nothing but time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Busy(RuntimeError):
    """The queue is full, or the service is ending: another server, or a later try, may answer."""


@dataclass(slots=True)
class _Waiting(Generic[Item, Result]):
    item: Item
    answer: asyncio.Future[Result]
    arrived: float


class Batcher(Generic[Item, Result]):
    """`work` gets the items of a batch, on a thread, and returns one result for each, in their order.

    `max_wait` is in seconds. `on_batch` is told the size of each batch.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result]],
        max_batch: int,
        max_wait: float,
        max_queue: int = 1024,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._work = work
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._max_queue = max_queue
        self._on_batch = on_batch
        # None, the last one, ends the loop.
        self._queue: asyncio.Queue[_Waiting[Item, Result] | None] = asyncio.Queue()
        self._loop: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        """Needs a running event loop."""
        self._loop = asyncio.create_task(self._run(), name="batcher")

    async def close(self) -> None:
        """Takes nothing more, answers what was taken, and ends."""
        if not self._closing:
            self._closing = True
            self._queue.put_nowait(None)
        if self._loop is not None:
            await self._loop

    async def submit(self, item: Item) -> Result:
        """The item's result. Raises Busy, or what `work` raised for this item."""
        if self._closing:
            raise Busy("the service is shutting down")
        if self._queue.qsize() >= self._max_queue:
            raise Busy(f"{self._max_queue} queries are waiting already")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(item, loop.create_future(), loop.time())
        self._queue.put_nowait(waiting)
        return await waiting.answer

    async def _run(self) -> None:
        while batch := await self._gather():
            # Whoever has hung up meanwhile needs no answer.
            wanted = [waiting for waiting in batch if not waiting.answer.done()]
            if wanted:
                self._on_batch(len(wanted))
                await self._answer(wanted)

    async def _gather(self) -> list[_Waiting[Item, Result]]:
        """The next batch; empty at the end."""
        batch: list[_Waiting[Item, Result]] = []
        while len(batch) < self._max_batch:
            try:
                waiting = await self._next(batch)
            except TimeoutError:
                break
            if waiting is None:
                # For the next round, which then finds it alone.
                if batch:
                    self._queue.put_nowait(None)
                break
            batch.append(waiting)
        return batch

    async def _next(self, batch: Sequence[_Waiting[Item, Result]]) -> _Waiting[Item, Result] | None:
        """The next item. Raises TimeoutError once the first item of the batch has waited long enough."""
        if not batch or not self._queue.empty():
            return await self._queue.get()
        left = batch[0].arrived + self._max_wait - asyncio.get_running_loop().time()
        return await asyncio.wait_for(self._queue.get(), left)

    async def _answer(self, batch: Sequence[_Waiting[Item, Result]]) -> None:
        try:
            results = await asyncio.to_thread(self._work, [waiting.item for waiting in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"{len(results)} results came back for a batch of {len(batch)}")
        except Exception as error:  # noqa: BLE001 - whatever the work raises; those who asked get it
            if len(batch) > 1:
                for waiting in batch:
                    await self._answer([waiting])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(result)
