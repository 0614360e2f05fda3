"""Calls to the buffer's process that travel together: those of one group are small, and there are many groups."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from megasync.buffer.async_buffer import Answer, Call
from megasync.buffer.link import Link
from megasync.errors import MegasyncError, ProcessLost, TrainingError


class Actor(Protocol):
    """Has the methods of `ActorGroup` that calls to the buffer need."""

    async def call_one(self, slot: int, method: str, *args: Any, timeout: float | None, **kwargs: Any) -> Any: ...


class LinkedActor:
    """The actor at the other end of a link, in the place of an `ActorGroup` of one: its calls raise the same errors."""

    def __init__(self, role: str, link: Link) -> None:
        self._role = role
        self._link = link

    async def call_one(self, slot: int, method: str, *args: Any, timeout: float | None, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await self._link.call(method, *args, **kwargs)
        except MegasyncError:
            raise
        except TimeoutError:
            raise ProcessLost(f"{self._role} {slot} did not finish {method}() within {timeout:.0f} s") from None
        except ConnectionError as error:
            raise ProcessLost(f"{self._role} {slot} died during {method}(): {error}") from error
        except Exception as error:
            raise TrainingError(f"{self._role} {slot} failed in {method}(): {type(error).__name__}: {error}") from error


class BufferCalls:
    """Calls that come while others are on their way form one message and one transaction (`AsyncBuffer.batch`).

    `seconds` is the deadline of a message.
    """

    def __init__(self, actor: Actor, seconds: float) -> None:
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
