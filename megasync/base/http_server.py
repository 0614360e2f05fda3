"""How the package's HTTP servers are made and listen, and their log, which strangers cannot fill.

What is no HTTP gets its answer and no line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megasync.errors import ConfigError

SERVER_LOG = logging.getLogger(__name__)

# Seconds to wait for open connections when a server closes.
_CLOSE_SECONDS = 1.0
# Connections that may wait to be accepted: all agents or samples of a step may start at the same moment.
_BACKLOG = 4096


def low_level(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], most_bytes: Callable[[str], int], **options: Any
) -> web.ServerRunner:
    """aiohttp's server without an application, whose router and middlewares would take half of the HTTP time.

    `most_bytes` is the most that a request of this path may have as its body. A client that disconnects cancels
    `answer`. `options` are those of `web.Server`.
    """

    def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop, size = asyncio.get_running_loop(), most_bytes(message.path)
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)

    server = web.Server(
        answer, request_factory=request, access_log=None, logger=SERVER_LOG, handler_cancellation=True, **options
    )
    return web.ServerRunner(server, shutdown_timeout=_CLOSE_SECONDS)


async def listen(
    runner: web.BaseRunner, host: str, port: int, refused: str, *, tls: ssl.SSLContext | None = None
) -> str:
    """Has a server accept connections, and returns its URL.

    Raises ConfigError, which begins with `refused`, if the address cannot be bound.
    """
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=_BACKLOG, ssl_context=tls).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"{refused}: {error}; port=0 takes a free one") from error
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{runner.addresses[0][1]}"


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is of something else than a request that is no HTTP, of which aiohttp logs the traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


SERVER_LOG.addFilter(_is_news)
