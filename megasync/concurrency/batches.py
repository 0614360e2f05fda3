"""Work that many tasks hand to one thread: whatever comes while it works is its next batch.

Invariant: batches run one at a time, and items in the order in which they were put.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from megasync.concurrency.threads import call_on, resolve

Item = TypeVar("Item")
Result = TypeVar("Result")

# Calls a function beside the event loop and returns its result.
Run = Callable[[Callable[[], Any]], Awaitable[Any]]


class Batches(Generic[Item, Result]):
    """Calls ``work`` with each batch of items, on the event loop: it returns what the thread is to do with them.

    That returns one result for each item, or raises for all of them; ``failed`` learns of it before anybody else.
    ``run`` replaces the thread, called ``name``.
    """

    def __init__(
        self,
        work: Callable[[list[Item]], Callable[[], Sequence[Result]]],
        name: str,
        run: Run | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._work = work
        self._failed = failed
        self._run = run or self._in_thread
        # What the thread is to call, and where the outcome goes; None ends it. Half the cost of an executor.
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
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
        self._calls.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    async def _work_off(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await self._run(self._work([item for item, _ in batch]))
            except Exception as error:  # noqa: BLE001 - whatever it is, each caller gets it
                self._failed(error)
                for _, result in batch:
                    if not result.done():
                        result.set_exception(error)
                        # A caller that was cancelled does not retrieve it.
                        result.exception()
                continue
            for (_, result), value in zip(batch, results, strict=True):
                if not result.done():
                    result.set_result(value)

    def _in_thread(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._thread.ident is None:
            self._thread.start()
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put((call, outcome))
        return outcome

    def _serve(self) -> None:
        while (order := self._calls.get()) is not None:
            call, outcome = order
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:  # noqa: BLE001 - raised again on the event loop
                error = raised
            call_on(outcome.get_loop(), resolve, outcome, value, error)
