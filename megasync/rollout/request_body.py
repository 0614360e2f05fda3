"""The body of a request, which becomes text only while it is sent.

A request waits for its answer far longer than it takes to send. Its body must therefore not hold the text of its ids,
256 kB for 32k tokens, but only the ids, whose array belongs to the conversation.
"""

from __future__ import annotations

import functools
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp.abc import AbstractStreamWriter
from numpy.typing import NDArray

from megasync.rollout.tokens import Tokens

_BEGIN, _END = b'{"input_ids":[', b"],"
# An id, blanks and a comma. JSON allows blanks between a number and a comma.
_WIDTH = 8


class RequestBody(aiohttp.payload.Payload):
    """The JSON object `{"input_ids": [...], **rest}`. Ids are in [0, vocab_size), and there is at least one."""

    def __init__(self, ids: Tokens, vocab_size: int, rest: dict[str, Any]) -> None:
        super().__init__(ids, content_type="application/json")
        self._ids = ids.array
        self._texts = _texts(vocab_size)
        self._rest = _END + orjson.dumps(rest)[1:]
        # The last comma is left out.
        self._size = len(_BEGIN) + _WIDTH * self._ids.size - 1 + len(self._rest)

    def text(self) -> bytes:
        ids = self._texts.take(self._ids).view(np.uint8)[:-1]
        return b"".join((_BEGIN, ids.data, self._rest))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.text().decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self.text())


@functools.lru_cache(maxsize=4)
def _texts(vocab_size: int) -> NDArray[np.uint64]:
    """The text of each id, as the bytes of one number, [vocab_size]: one look-up is faster than formatting digits."""
    if vocab_size > 10 ** (_WIDTH - 1):
        raise ValueError(f"a vocabulary of {vocab_size} ids, and at most {10 ** (_WIDTH - 1)} are supported")
    digits = np.arange(vocab_size).astype(f"S{_WIDTH}").view(np.uint8).reshape(vocab_size, _WIDTH)
    digits[digits == 0] = ord(" ")
    digits[:, -1] = ord(",")
    return digits.view(np.uint64)[:, 0]
