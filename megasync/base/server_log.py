"""The log of HTTP servers, which strangers cannot fill: what is no HTTP gets its answer and no line."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

SERVER_LOG = logging.getLogger(__name__)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is of something else than a request that is no HTTP, of which aiohttp logs the traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


SERVER_LOG.addFilter(_is_news)
