"""The client of the retrieval servers; several URLs are used as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from deepresearch.http_pool import DEFAULT_LIMITS, HttpPool, Limits


class RetrieveClient:
    """Raises ServiceFailed or RequestRefused (`http_pool`)."""

    def __init__(self, urls: Sequence[str], limits: Limits = DEFAULT_LIMITS) -> None:
        self._pool = HttpPool(urls, limits)

    async def retrieve(self, query: str, top_k: int) -> list[dict[str, Any]]:
        """Passages, best first: dictionaries with id, document, title, text and score."""
        answer = await self._pool.request("POST", "/retrieve", {"queries": [query], "top_k": top_k})
        return answer["results"][0]

    async def document(self, document_id: str) -> dict[str, str]:
        """A whole document: id, title, text."""
        return await self._pool.request("GET", f"/documents/{quote(document_id, safe='')}")

    async def stats(self) -> dict[str, Any]:
        return await self._pool.request("GET", "/stats")

    async def close(self) -> None:
        await self._pool.close()
