"""Clients of the retrieval server and of the refine service; several URLs of each are used as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from deepresearch.http_pool import DEFAULT_LIMITS, HttpPool, Limits, ServiceFailed

NOTES = (
    "Copy from the passages what helps to answer the query, in at most {sentences} short sentences. Add nothing of "
    "your own.\n\nQuery: {query}\n\nPassages:\n{passages}"
)


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


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to ask a kind of refine service, and where its answer has the text."""

    path: str
    body: Callable[[str, Sequence[dict[str, Any]], int, str], dict[str, Any]]
    text: Callable[[Any], str]


def as_text(passages: Sequence[dict[str, Any]]) -> str:
    """Passages as a model reads them, a line each."""
    return "\n".join(f"{passage['title']}: {passage['text']}" for passage in passages)


def _extractive(query: str, passages: Sequence[dict[str, Any]], sentences: int, model: str) -> dict[str, Any]:
    titled = [{"title": passage["title"], "text": passage["text"]} for passage in passages]
    return {"query": query, "passages": titled, "max_sentences": sentences}


def _chat(query: str, passages: Sequence[dict[str, Any]], sentences: int, model: str) -> dict[str, Any]:
    prompt = NOTES.format(sentences=sentences, query=query, passages=as_text(passages))
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": 64 * sentences,
    }


PROTOCOLS = {
    # refiner.py
    "extractive": Protocol("/refine", _extractive, lambda answer: answer["text"]),
    # Any OpenAI-compatible server of a language model; give URLs without the /v1.
    "openai": Protocol("/v1/chat/completions", _chat, lambda answer: answer["choices"][0]["message"]["content"]),
}


class RefineClient:
    """`protocol` is one of PROTOCOLS; `model` and `api_key` are for openai. Raises as RetrieveClient does, and
    ServiceFailed for an answer without a text."""

    def __init__(
        self,
        urls: Sequence[str],
        limits: Limits = DEFAULT_LIMITS,
        *,
        protocol: str = "extractive",
        model: str = "default",
        api_key: str | None = None,
        sentences: int = 3,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ValueError(f"unknown protocol {protocol!r}; refine services speak {', '.join(PROTOCOLS)}")
        self.pool = HttpPool(urls, limits, {"Authorization": f"Bearer {api_key}"} if api_key else None)
        self._protocol = PROTOCOLS[protocol]
        self._model = model
        self._sentences = sentences

    async def refine(self, query: str, passages: Sequence[dict[str, Any]]) -> str:
        """What bears on the query of these passages, dictionaries with at least title and text."""
        body = self._protocol.body(query, passages, self._sentences, self._model)
        answer = await self.pool.request("POST", self._protocol.path, body)
        try:
            text = self._protocol.text(answer)
        except (LookupError, TypeError):
            text = None
        # A language model may say nothing (null where it only thought or called a tool), or a proxy speak for it.
        if not isinstance(text, str) or not text.strip():
            raise ServiceFailed(f"{self._protocol.path} answered without a text: {answer!r:.300}")
        return text

    async def close(self) -> None:
        await self.pool.close()
