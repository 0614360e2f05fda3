"""The retrieval server over real HTTP: what it answers, refuses and counts."""

import asyncio
import contextlib

import aiohttp
import psutil
import pytest
import uvicorn
from deepresearch import retriever
from deepresearch.documents import Document, passages
from deepresearch.folders import DataFolder
from deepresearch.http_pool import RequestRefused, ServiceFailed
from deepresearch.prepare import prepare
from deepresearch.retrieve_client import RetrieveClient
from deepresearch.searcher import Searcher
from deepresearch.services import running_retriever
from deepresearch.sharded_index import MatrixShard, ShardedIndex
from fake_embedder import FakeEmbedder

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
    vectors = FakeEmbedder().encode([f"{p.title}. {p.text}" for p in pieces])
    index = ShardedIndex([MatrixShard(vectors[:2], 0), MatrixShard(vectors[2:], 2)])
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


@pytest.mark.matrix
@pytest.mark.processes
async def test_a_shard_that_dies_is_restarted_and_searches_find_the_same(tmp_path):
    data = DataFolder(tmp_path / "data")
    prepare(data, shards=2)
    others = psutil.Process().children(recursive=True)
    async with running_retriever(data, tmp_path / "logs") as url:
        client = RetrieveClient([url])
        before = await client.retrieve("Zanoburg river", 3)
        assert [found["title"] for found in before[:2]] == ["Zanoburg", "Zanoburg"]
        children = psutil.Process().children(recursive=True)
        (shard,) = (
            child
            for child in children
            if child.cmdline()[1:3] == ["-m", "deepresearch.remote_shard"] and child.cmdline()[-1] == "1"
        )
        shard.kill()
        after = None
        while after is None:
            with contextlib.suppress(ServiceFailed):
                after = await client.retrieve("Zanoburg river", 3)
        assert after == before
        await client.close()
    assert not [child for child in psutil.Process().children(recursive=True) if child not in others]
