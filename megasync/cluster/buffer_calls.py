"""Calls to the buffer's process that travel together: those of one group are small, and there are many groups."""

from __future__ import annotations

import asyncio
from typing import Any

from megasync.buffer.async_buffer import Answer, Call
from megasync.cluster.actors import ActorGroup


class BufferCalls:
    """Calls that come while others are on their way form one message and one transaction (`AsyncBuffer.batch`).

    `seconds` is the deadline of a message.
    """

    def __init__(self, actor: ActorGroup, seconds: float) -> None:
        self._actor = actor
        self._seconds = seconds
        # Calls for the next message, with the futures of their answers.
        self._queued: list[tuple[Call, asyncio.Future[Answer]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Answer:
        """The answer to a call of `BATCHED`, which "waits" when it could not be made at once.

        Raises what the buffer raises, and ProcessLost.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queued.append(((method, arguments), answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="calls to the buffer")
        result = await answer
        if result.outcome == "failed":
            raise result.value
        return result

    async def _send(self) -> None:
        # Calls of other tasks that are ready now come along.
        await asyncio.sleep(0)
        while self._queued:
            batch, self._queued = [entry for entry in self._queued if not entry[1].done()], []
            try:
                calls = [call for call, _ in batch]
                answers = await self._actor.call_one(0, "batch", calls, timeout=self._seconds)
            except Exception as error:  # noqa: BLE001 - whatever it is, every caller gets it
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), value in zip(batch, answers, strict=True):
                if not answer.done():
                    answer.set_result(value)
