"""Server-sent events of a streamed `/generate`: each is one JSON object, the last one `[DONE]`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from megasync.errors import InvalidAnswer

_PREFIX = b"data:"
_END = b"[DONE]"
CONTENT_TYPE = "text/event-stream"


async def events(response: aiohttp.ClientResponse, most: int) -> AsyncIterator[bytes]:
    """The objects' JSON as they come. Ends with the stream, whether it was complete or not: the last object says which.

    Raises aiohttp.ClientError when the connection breaks, InvalidAnswer when it is no stream of events, or one of more
    than `most` bytes.
    """
    if response.content_type != CONTENT_TYPE:
        raise InvalidAnswer(f"its content type is {response.content_type!r:.100}, not {CONTENT_TYPE}")
    rest, size = b"", 0
    async for data in response.content.iter_any():
        size += len(data)
        if size > most:
            raise InvalidAnswer(f"its stream of events has more than {most} bytes, which is too long")
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            content = event.removeprefix(_PREFIX).strip()
            if content != _END:
                yield content
