"""The two servers over real HTTP: what they answer, refuse and count."""

import asyncio
import contextlib

import aiohttp
import pytest
import uvicorn
from deepresearch import refiner, retriever
from deepresearch.clients import RefineClient, RetrieveClient
from deepresearch.documents import Document, passages
from deepresearch.http_pool import RequestRefused, ServiceFailed
from deepresearch.searcher import Searcher
from deepresearch.sharded_index import ShardedIndex
from fake_embedder import FakeEmbedder
from fastapi import FastAPI, Request

DOCUMENTS = [
    Document("a", "Brendal", "Brendal is a town. It lies on the river Ossa."),
    Document("b/1", "Ossa", "The Ossa is a river. It rises on Mount Korn."),
    Document("c", "Korn", "Korn is a mountain."),
]


@contextlib.asynccontextmanager
async def served(app):
    """The app behind uvicorn on a free port of loopback; ended as by SIGTERM."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on"))
    task = asyncio.create_task(server._serve())
    while not server.started:
        assert not task.done(), task
        await asyncio.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task


def retriever_app(embedder=None, **options):
    embedder = embedder or FakeEmbedder()
    pieces = [piece for document in DOCUMENTS for piece in passages(document, 100)]
    index = ShardedIndex.build(FakeEmbedder().encode([f"{p.title}. {p.text}" for p in pieces]), 2)
    searcher = Searcher(embedder, index, pieces)
    settings = {"max_batch": 4, "max_wait_ms": 5.0} | options
    return retriever.create_app(searcher, {document.id: document for document in DOCUMENTS}, **settings)


async def post(url, body):
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.json()


async def test_passages_include_their_metadata():
    async with served(retriever_app()) as url:
        status, answer = await post(f"{url}/retrieve", {"queries": [" Brendal town ", "Korn"], "top_k": 2})
        assert status == 200
        brendal, korn = answer["results"]
        assert (len(brendal), len(korn)) == (2, 2)
        assert brendal[0] == {
            "score": brendal[0]["score"],
            "id": "a#0",
            "document": "a",
            "title": "Brendal",
            "text": DOCUMENTS[0].text,
        }
        assert (korn[0]["document"], korn[0]["score"] >= korn[1]["score"]) == ("c", True)


async def test_asking_for_more_hits_than_documents_returns_all():
    async with served(retriever_app()) as url:
        _, answer = await post(f"{url}/retrieve", {"queries": ["Ossa"], "top_k": 50})
        assert sorted(found["document"] for found in answer["results"][0]) == ["a", "b/1", "c"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"queries": []}, "queries"),
        ({"queries": ["  "]}, "queries"),
        ({"queries": ["x" * 2001]}, "queries"),
        ({"queries": ["x"] * 65}, "queries"),
        ({"queries": "x"}, "queries"),
        ({"queries": ["\ud800"]}, "queries"),
        ({"queries": ["x"], "top_k": 0}, "top_k"),
        ({"queries": ["x"], "top_k": 51}, "top_k"),
        ({"queries": ["x"], "topk": 3}, "topk"),
    ],
)
async def test_a_request_that_is_wrong_is_refused_with_the_field(body, field):
    async with served(retriever_app()) as url:
        status, answer = await post(f"{url}/retrieve", body)
        assert status == 422
        assert answer["detail"][0]["loc"][1] == field


async def test_a_query_that_breaks_the_search_fails_only_its_own_request():
    app = retriever_app(FakeEmbedder(breaks_on="boom"), max_batch=2, max_wait_ms=60_000.0)
    async with served(app) as url:
        bad, good = await asyncio.gather(
            post(f"{url}/retrieve", {"queries": ["boom"]}), post(f"{url}/retrieve", {"queries": ["Korn"], "top_k": 1})
        )
        assert bad == (500, {"detail": "the search failed: ValueError: cannot embed 'boom'"})
        assert good[0] == 200
        assert good[1]["results"][0][0]["document"] == "c"
        async with aiohttp.ClientSession() as session, session.get(f"{url}/stats") as response:
            stats = await response.json()
        assert (stats["requests"], stats["failed"], stats["batch_sizes"]) == (2, 1, {"2": 1})


async def test_an_overloaded_server_says_so():
    async with served(retriever_app(max_queue=1, max_batch=8, max_wait_ms=200.0)) as url:
        status, answer = await post(f"{url}/retrieve", {"queries": ["x", "y", "z"]})
        assert status == 503
        assert "try again later" in answer["detail"]


async def test_health_and_stats():
    async with served(retriever_app()) as url:
        client = RetrieveClient([url])
        await asyncio.gather(*(client.retrieve("Ossa", 1) for _ in range(8)))
        stats = await client.stats()
        assert (stats["requests"], stats["queries"], stats["failed"], stats["invalid_rows"]) == (8, 8, 0, 0)
        assert sum(int(size) * count for size, count in stats["batch_sizes"].items()) == 8
        assert stats["latency_ms_p95"] >= stats["latency_ms_p50"] > 0
        await client.close()
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            assert await response.json() == {"status": "ok", "passages": 3, "shards": 2}


async def test_documents_by_id():
    async with served(retriever_app()) as url:
        client = RetrieveClient([url])
        assert (await client.document("b/1"))["title"] == "Ossa"
        for wrong in ("-1", "3", "nobody"):
            with pytest.raises(RequestRefused, match=f"404.*there is no document '{wrong}'"):
                await client.document(wrong)
        await client.close()


async def test_the_refiner_keeps_the_closest_sentences_in_their_order():
    found = [{"title": document.title, "text": document.text, "id": "x"} for document in DOCUMENTS]
    async with served(refiner.create_app(FakeEmbedder())) as url:
        client = RefineClient([url], sentences=2)
        text = await client.refine("it lies on the river which rises on mount", found)
        assert text == "Brendal: It lies on the river Ossa.\nOssa: It rises on Mount Korn."
        await client.close()
        status, answer = await post(f"{url}/refine", {"query": "x", "passages": []})
        assert (status, answer["detail"][0]["loc"][1]) == (422, "passages")


@contextlib.asynccontextmanager
async def language_model(answer):
    """A client of an OpenAI-compatible server that gives one answer to everything."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def complete(request: Request):
        assert (await request.json())["messages"][0]["content"].count("Brendal: Brendal is a town.") == 1
        return answer

    async with served(app) as url:
        client = RefineClient([url], protocol="openai")
        try:
            yield client
        finally:
            await client.close()


def choice(content):
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


FOUND = [{"title": "Brendal", "text": "Brendal is a town."}]


async def test_a_language_model_can_refine():
    async with language_model(choice("It is a town.")) as client:
        assert await client.refine("what is Brendal", FOUND) == "It is a town."


@pytest.mark.parametrize(
    "answer",
    [choice(None), choice(" \n"), choice([{"type": "text"}]), {"choices": []}, {"error": "overloaded"}, [], None],
)
async def test_an_answer_without_a_text_is_a_failure_of_the_service(answer):
    async with language_model(answer) as client:
        with pytest.raises(ServiceFailed, match="/v1/chat/completions answered without a text: "):
            await client.refine("what is Brendal", FOUND)
