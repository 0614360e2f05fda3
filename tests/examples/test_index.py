"""Shards merged exactly, an index that fits its corpus, and rows without a document."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from deepresearch import remote_shard
from deepresearch.documents import Document, Passage, passages
from deepresearch.embedder import EMBEDDERS, HashedWords, MiniLM
from deepresearch.folders import DataFolder
from deepresearch.index_folder import StaleIndex, build_index, embedder_name, is_current, open_index, shard_files
from deepresearch.prepare import prepare
from deepresearch.remote_shard import RemoteShard
from deepresearch.searcher import Query, Searcher
from deepresearch.sharded_index import NO_ROW, MatrixShard, ShardedIndex, load_shards, split
from fake_embedder import FakeEmbedder
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

DIMENSION = 8


class OverHttp:
    """A shard as the retriever reaches it: the connection's methods call the server's app."""

    def __init__(self, shard):
        self.client, self.down = TestClient(remote_shard.create_app(shard)), 0

    def request(self, method, path, body=None):
        if self.down:
            self.down -= 1
            raise ConnectionResetError("gone")
        self.answer = self.client.request(method, path, content=body)

    def getresponse(self):
        return SimpleNamespace(status=self.answer.status_code, read=lambda: self.answer.content)

    def close(self): ...


def remote(shard, monkeypatch):
    connection = OverHttp(shard)
    monkeypatch.setattr(remote_shard.http.client, "HTTPConnection", lambda *_, **__: connection)
    return RemoteShard("http://shard"), connection


def matrices(vectors, count):
    shards, first = [], 0
    for part in split(vectors, count):
        shards.append(MatrixShard(part, first))
        first += len(part)
    return shards


@given(
    rows=st.integers(1, 40),
    shards=st.integers(1, 7),
    top_k=st.integers(1, 50),
    seed=st.integers(0, 10_000),
    apart=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_a_sharded_search_equals_a_search_over_all_vectors(rows, shards, top_k, seed, apart):
    chance = np.random.default_rng(seed)
    vectors = chance.normal(size=(rows, DIMENSION)).astype(np.float32)
    queries = chance.normal(size=(3, DIMENSION)).astype(np.float32)
    parts = matrices(vectors, shards)
    with pytest.MonkeyPatch.context() as patch:
        index = ShardedIndex([remote(part, patch)[0] for part in parts] if apart else parts)
        assert len(index) == rows
        assert len(index.shards) == min(shards, rows)
        scores, found = index.search(queries, top_k)
    products = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    expected = np.argsort(-products, axis=1)[:, :top_k]
    kept = expected.shape[1]
    assert np.array_equal(found[:, :kept], expected)
    assert np.allclose(scores[:, :kept], np.take_along_axis(products, expected, axis=1), atol=1e-4)
    assert (found[:, kept:] == NO_ROW).all()


def test_a_shard_that_was_restarted_is_reached_again_and_one_that_is_gone_is_an_error(monkeypatch):
    shard, connection = remote(MatrixShard(np.eye(3, dtype=np.float32), 5), monkeypatch)
    query = np.array([[0, 1, 0]], np.float32)
    connection.down = 1
    assert shard.search(query, 1)[1].tolist() == [[6]]
    connection.down = 2
    with pytest.raises(ConnectionError, match="gone"):
        shard.search(query, 1)
    assert shard.search(query, 1)[1].tolist() == [[6]]
    with pytest.raises(ConnectionError, match="answered 422.*8 bytes for vectors of 3 float32"):
        shard.search(np.zeros((1, 2), np.float32), 1)


class FakeIndex:
    """Finds the given rows."""

    def __init__(self, *rows):
        self.rows = rows

    def search(self, vectors, top_k):
        rows = np.array([self.rows] * len(vectors))
        return np.linspace(1, 0, rows.size, dtype=np.float32).reshape(rows.shape), rows


def test_a_row_without_a_document_is_not_a_hit():
    pieces = [Passage(f"p{n}", f"d{n}", "t", "x") for n in range(3)]
    searcher = Searcher(FakeEmbedder(), FakeIndex(2, 3, -1, 0, 10**12, -7), pieces)
    (hits,) = searcher([Query("x", 6)])
    assert [hit.passage.id for hit in hits] == ["p2", "p0"]
    assert searcher.invalid_rows == 3, "3, 10**12 and -7; -1 says that there was no more"


def test_each_query_gets_as_many_hits_as_it_asked_for():
    pieces = [Passage(f"p{n}", f"d{n}", "t", f"word{n}") for n in range(9)]
    embedder = FakeEmbedder()
    index = ShardedIndex(matrices(embedder.encode([piece.text for piece in pieces]), 2))
    few, many = Searcher(embedder, index, pieces)([Query("word3", 1), Query("word5", 20)])
    assert [hit.passage.id for hit in few] == ["p3"]
    assert (len(many), many[0].passage.id) == (9, "p5")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": f"d{n}", "title": f"Title{n}", "text": f"One is {n}. Two is {n} as well."} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_index_is_opened_as_it_was_built(corpus, tmp_path):
    build_index(tmp_path / "index", corpus, FakeEmbedder(), shards=2, max_words=4)
    files, pieces = open_index(tmp_path / "index", corpus, FakeEmbedder())
    assert files == shard_files(tmp_path / "index")
    assert embedder_name(tmp_path / "index") == "fake"
    assert [shard.rows for shard in load_shards(files, ["cpu"])] == [5, 5]
    (second,) = load_shards(files, ["cpu"], only=1)
    assert second.search(FakeEmbedder().encode(["Title4. One is 4."]), 1)[1].tolist() == [[8]]
    assert pieces[3] == Passage("d1#1", "d1", "Title1", "Two is 1 as well.")
    assert is_current(tmp_path / "index", corpus, FakeEmbedder(), 2, 4)
    assert not is_current(tmp_path / "index", corpus, FakeEmbedder(), 3, 4)
    assert not is_current(tmp_path / "index", corpus, FakeEmbedder(), 2, 5)


@pytest.mark.parametrize(
    ("change", "embedder", "why"),
    [
        (lambda corpus, index: corpus.write_text(corpus.read_text() + "\n"), "fake", "corpus.jsonl has changed since"),
        (lambda corpus, index: None, "other", "built with another embedder"),
        (
            lambda corpus, index: (index / "shard-001.npy").write_bytes(b"x"),
            "fake",
            "shard-001.npy is missing or damaged",
        ),
        (lambda corpus, index: (index / "passages.jsonl").unlink(), "fake", "passages.jsonl is missing or damaged"),
        (lambda corpus, index: (index / "meta.json").unlink(), "fake", "meta.json cannot be read"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(corpus, tmp_path, change, embedder, why):
    index = tmp_path / "index"
    build_index(index, corpus, FakeEmbedder(), shards=2, max_words=4)
    change(corpus, index)
    with pytest.raises(StaleIndex, match=rf"{why}.*build it again"):
        open_index(index, corpus, FakeEmbedder(digest=embedder))
    assert not is_current(index, corpus, FakeEmbedder(digest=embedder), 2, 4)


def test_a_failed_build_leaves_the_old_index(corpus, tmp_path):
    build_index(tmp_path / "index", corpus, FakeEmbedder(), shards=2, max_words=4)
    with pytest.raises(ValueError, match="cannot embed"):
        build_index(tmp_path / "index", corpus, FakeEmbedder(breaks_on="Title0. One is 0."), shards=2, max_words=4)
    open_index(tmp_path / "index", corpus, FakeEmbedder())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def test_passages_are_whole_sentences():
    text = "One two three. Four five! Six seven eight nine ten eleven. Twelve?"
    pieces = [piece.text for piece in passages(Document("d", "t", text), max_words=5)]
    assert pieces == ["One two three. Four five!", "Six seven eight nine ten eleven.", "Twelve?"]


def test_preparing_again_keeps_an_index_that_fits(tmp_path):
    data, embedder = DataFolder(tmp_path), FakeEmbedder()
    prepare(data, embedder=embedder)
    first = len(embedder.batches)
    prepare(data, embedder=embedder)
    assert len(embedder.batches) == first
    prepare(data, embedder=embedder, seed=1)
    assert len(embedder.batches) > first


def test_hashed_words_find_names_and_a_language_model_finds_meaning():
    texts = ["Balarith is a town by the sea.", "Korunik is a novel about a ferry and its crew.", "..."]
    for embedder, query in ((HashedWords(), "Korunik author"), (MiniLM(), "book on ships")):
        vectors = embedder.encode(texts)
        assert vectors.shape == (3, embedder.dimension) and vectors.dtype == np.float32
        assert np.linalg.norm(vectors[:2], axis=1) == pytest.approx([1, 1], abs=1e-5)
        assert (embedder.encode([query]) @ vectors.T).argmax() == 1
    assert len({embedder().digest for embedder in EMBEDDERS.values()}) == 2
    assert not HashedWords().encode(["..."]).any(), "no word, no direction"
