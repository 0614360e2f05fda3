"""The refine server: `POST /refine` keeps the sentences of some passages that are closest to a query; `GET /health`.

    python -m deepresearch.refiner [--host 127.0.0.1] [--port 8102]

It is extractive, by the embedder that the index is made with, so that it runs on a CPU. A large language model writes
better notes: `RefineClient` asks one instead when it is told so.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from deepresearch.documents import sentences
from deepresearch.serve import add_address, refuse_clearly, serve

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=20_000)]


class TitledText(BaseModel):
    title: Text
    text: Text


class RefineRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    query: Text
    passages: list[TitledText] = Field(min_length=1, max_length=50)
    max_sentences: int = Field(default=3, ge=1, le=20)


class RefineResponse(BaseModel):
    text: str


def extract(embedder: Any, query: str, passages: Sequence[tuple[str, str]], max_sentences: int) -> str:
    """The `max_sentences` sentences closest to the query, in the order in which they stand in the passages.

    `passages` are pairs of title and text. A sentence is compared and shown with its title, because it may call its
    subject "it".
    """
    # A dictionary, for passages may share sentences.
    found = list(dict.fromkeys(f"{title}: {sentence}" for title, text in passages for sentence in sentences(text)))
    vectors = embedder.encode([query, *found])
    closeness = vectors[1:] @ vectors[0]
    kept = sorted(sorted(range(len(found)), key=lambda n: -closeness[n])[:max_sentences])
    return "\n".join(found[n] for n in kept)


def create_app(embedder: Any) -> FastAPI:
    app = FastAPI(title="refiner")
    refuse_clearly(app)
    # One at a time: the embedder is not for several threads, and would gain nothing by them on a CPU.
    turn = asyncio.Lock()

    @app.post("/refine")
    async def refine(request: RefineRequest) -> RefineResponse:
        async with turn:
            passages = [(passage.title, passage.text) for passage in request.passages]
            text = await asyncio.to_thread(extract, embedder, request.query, passages, request.max_sentences)
        return RefineResponse(text=text)

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok"}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_address(parser, port=8102)
    options = parser.parse_args()

    from deepresearch.embedder import Embedder

    serve(create_app(Embedder()), options)


if __name__ == "__main__":
    main()
