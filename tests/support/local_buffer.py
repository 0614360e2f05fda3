"""A buffer with a ledger for tests that are not async: each call returns its answer, or None if it would wait."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any

from megasync.buffer import AsyncBuffer


class LocalBuffer:
    """The calls of `AsyncBuffer` without `await`; `change` makes any change of the state machine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.buffer = AsyncBuffer(*arguments, **options)
        self.state, self.ledger = self.buffer._state, self.buffer._ledger
        self._runner = asyncio.Runner()

    def change(self, call: Callable[[Any], Any]) -> Any:
        return self._runner.run(self._answer(self.buffer._change(call)))

    def partials(self, uid: str) -> dict[tuple[int, int], bytes]:
        return self._runner.run(self.buffer.partials(uid))

    def die(self) -> None:
        """As by kill -9: what is recorded survives. The lock on the file goes with the process."""
        self._runner.close()
        kill(self.buffer)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.buffer, name)
        if not inspect.iscoroutinefunction(method):
            return method
        return lambda *arguments: self._runner.run(self._answer(method(*arguments)))

    async def _answer(self, call: Any) -> Any:
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.sleep(0)
            if self.ledger is not None and self.buffer._records.busy:
                await asyncio.wait([task, self.buffer._records._working], return_when=asyncio.FIRST_COMPLETED)
                continue
            if await self.buffer.waiting():
                task.cancel()
                await asyncio.wait([task])
                return None
        return task.result()


def kill(buffer: AsyncBuffer) -> None:
    """Ends a buffer as kill -9 of its process does: whatever is recorded survives, and nothing else is written."""
    records = buffer._records
    with suppress(Empty):
        records._calls.get_nowait()
    records._calls.put(None)
    if records._thread.ident is not None:
        records._thread.join()
    buffer._ledger.close()
