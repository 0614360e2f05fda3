"""HTTP responses in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson


class Answer:
    """An HTTP response, for the server that sends it and, as `aiohttp.ClientResponse`, for the client that reads it.

    Its body consists of chunks, then its end or a broken connection.
    """

    def __init__(self) -> None:
        self.status = 200
        self.content_type = "application/json"
        self.headers: dict[str, str] = {}
        self.ended = False
        self.broken = False
        # The client has closed the connection.
        self.left = False
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def send(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._changed.set()

    def end(self) -> None:
        self.ended = True
        self._changed.set()

    @property
    def content(self) -> Answer:
        return self

    @property
    def received(self) -> bool:
        """Whether the client has received the whole body."""
        return self.ended and not self.broken and not self._pieces

    def cut(self) -> None:
        """Break the connection. The client can still read chunks that were sent before."""
        if not self.ended:
            self.broken = self.ended = True
            self._changed.set()

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.iter_any()])

    async def iter_any(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self.broken:
                raise aiohttp.ClientPayloadError("the connection broke")
            if self.ended:
                return
            self._changed.clear()
            await self._changed.wait()


def sent_answer(body: bytes, status: int = 200) -> Answer:
    answer = Answer()
    answer.status = status
    answer.send(body)
    answer.end()
    return answer


def json_answer(value: Any) -> Answer:
    return sent_answer(orjson.dumps(value))


def failed_answer(status: int, text: str) -> Answer:
    return sent_answer(text.encode(), status)
