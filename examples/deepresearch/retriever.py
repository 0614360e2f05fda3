"""The retrieval server: `POST /retrieve`, `GET /documents/ID`, `GET /health`, `GET /stats`.

    python -m deepresearch.retriever --data DIR [--shards URL ... | --devices cuda:0 ...] [--port 8101]

`--data` is what `prepare.py` made. The shards of its index are on servers of their own, or on devices of this process.
SIGTERM and Ctrl-C end it after the requests that it has taken.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from deepresearch.batcher import Batcher, Busy
from deepresearch.documents import Document, read_documents
from deepresearch.embedder import EMBEDDERS
from deepresearch.folders import DataFolder
from deepresearch.index_folder import embedder_name, open_index
from deepresearch.remote_shard import RemoteShard
from deepresearch.searcher import Hit, Query, Searcher
from deepresearch.serve import add_address, refuse_clearly, serve
from deepresearch.sharded_index import ShardedIndex, load_shards
from deepresearch.stats import Stats

QueryText = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]


class RetrieveRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queries: list[QueryText] = Field(min_length=1, max_length=64)
    top_k: int = Field(default=3, ge=1, le=50)


class Found(BaseModel):
    id: str
    document: str
    title: str
    text: str
    score: float


class RetrieveResponse(BaseModel):
    # One list for each query, best first.
    results: list[list[Found]]


def create_app(
    searcher: Searcher, documents: Mapping[str, Document], max_batch: int, max_wait_ms: float, max_queue: int = 1024
) -> FastAPI:
    """Embeds and searches the queries of requests that arrive within `max_wait_ms` together, up to `max_batch`."""
    stats = Stats()
    batcher: Batcher[Query, list[Hit]] = Batcher(searcher, max_batch, max_wait_ms / 1000, max_queue, stats.batch)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.close()

    app = FastAPI(title="retriever", lifespan=lifespan)
    refuse_clearly(app)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> RetrieveResponse:
        began = time.monotonic()
        asked = (batcher.submit(Query(text, request.top_k)) for text in request.queries)
        # All are awaited even when one fails: none may be left behind without anybody to hear of it.
        ended = await asyncio.gather(*asked, return_exceptions=True)
        problem = next((answer for answer in ended if isinstance(answer, BaseException)), None)
        stats.request(time.monotonic() - began, ok=problem is None)
        if isinstance(problem, Busy):
            raise HTTPException(503, f"try again later: {problem}")
        if problem is not None:
            raise HTTPException(500, f"the search failed: {type(problem).__name__}: {problem}")
        answers = [answer for answer in ended if not isinstance(answer, BaseException)]
        return RetrieveResponse(results=[[_found(hit) for hit in hits] for hits in answers])

    @app.get("/documents/{document_id:path}")
    async def document(document_id: str) -> Document:
        if document_id not in documents:
            raise HTTPException(404, f"there is no document {document_id!r}")
        return documents[document_id]

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "passages": len(searcher.passages), "shards": len(searcher.index.shards)}

    @app.get("/stats")
    async def statistics() -> dict:
        return stats.summary() | {"invalid_rows": searcher.invalid_rows}

    return app


def _found(hit: Hit) -> Found:
    passage = hit.passage
    return Found(id=passage.id, document=passage.document, title=passage.title, text=passage.text, score=hit.score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that prepare.py made")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--shards", nargs="+", metavar="URL", help="shard servers, in any order (remote_shard.py)")
    where.add_argument("--devices", nargs="+", default=["cpu"], help="devices of this process that hold the shards")
    parser.add_argument("--max-batch", type=int, default=32, help="queries in one batch")
    parser.add_argument("--max-wait-ms", type=float, default=10.0, help="longest wait for a batch to fill")
    add_address(parser, port=8101)
    options = parser.parse_args()

    data = DataFolder.at(options.data)
    embedder = EMBEDDERS[embedder_name(data.index)]()
    files, passages = open_index(data.index, data.corpus, embedder)
    shards = [RemoteShard(url) for url in options.shards or ()] or load_shards(files, options.devices)
    if sum(shard.rows for shard in shards) != len(passages):
        parser.exit(1, f"the shards hold {sum(s.rows for s in shards)} of {len(passages)} vectors; name every shard\n")
    documents = {document.id: document for document in read_documents(data.corpus)}
    searcher = Searcher(embedder, ShardedIndex(shards), passages)
    serve(create_app(searcher, documents, options.max_batch, options.max_wait_ms), options)


if __name__ == "__main__":
    main()
