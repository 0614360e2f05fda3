"""Parses the server-sent events of a streamed `/generate`: each is one JSON object, the last is `[DONE]`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from megasync.errors import InvalidAnswer

_PREFIX = b"data:"
_END = b"[DONE]"
CONTENT_TYPE = "text/event-stream"


async def events(response: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    """Yield the JSON of each event until the stream ends. Only its last object tells whether the stream is complete.

    Raises aiohttp.ClientError if the connection breaks, and InvalidAnswer for another content type or a stream of more
    than `most` bytes.
    """
    if response.content_type != CONTENT_TYPE:
        raise InvalidAnswer(f"its content type is {response.content_type!r:.100}, not {CONTENT_TYPE}")
    rest, size = b"", 0
    async for data in response.content.iter_any():
        size += len(data)
        if size > most:
            raise InvalidAnswer(f"its event stream is longer than {most} bytes")
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            content = event.removeprefix(_PREFIX).strip()
            if content != _END:
                yield content
