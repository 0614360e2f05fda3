"""Server-sent events of a streamed `/generate`: each is one JSON object, the last one `[DONE]`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from megasync.errors import ServerError

_PREFIX = b"data:"
_END = b"[DONE]"


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The objects as they come. Ends with the stream, whether it was complete or not: the last object says which.

    Raises aiohttp.ClientError when the connection breaks, ServerError for an event that is no JSON object.
    """
    rest = b""
    async for data in response.content.iter_any():
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            content = event.removeprefix(_PREFIX).strip()
            if content == _END:
                continue
            try:
                found = orjson.loads(content)
            except orjson.JSONDecodeError:
                found = None
            if not isinstance(found, dict):
                raise ServerError(f"{response.url} sent an event that is no object: {event[:200]!r}")
            yield found
