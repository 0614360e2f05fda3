"""Shards merged exactly, an index that fits its corpus, and rows without a document."""

import json
from pathlib import Path

import numpy as np
import pytest
from deepresearch.documents import Document, Passage, passages
from deepresearch.folders import DataFolder
from deepresearch.index_folder import StaleIndex, build_index, is_current, open_index
from deepresearch.prepare import prepare
from deepresearch.searcher import Query, Searcher
from deepresearch.sharded_index import ShardedIndex
from fake_embedder import FakeEmbedder
from hypothesis import given
from hypothesis import strategies as st

DIMENSION = 8


@given(rows=st.integers(1, 40), shards=st.integers(1, 7), top_k=st.integers(1, 50), seed=st.integers(0, 10_000))
def test_a_sharded_search_equals_a_search_over_all_vectors(rows, shards, top_k, seed):
    chance = np.random.default_rng(seed)
    vectors = chance.normal(size=(rows, DIMENSION)).astype(np.float32)
    queries = chance.normal(size=(3, DIMENSION)).astype(np.float32)
    index = ShardedIndex.build(vectors, shards)
    assert len(index) == rows
    assert len(index.shards) == min(shards, rows)
    scores, found = index.search(queries, top_k)
    products = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    expected = np.argsort(-products, axis=1)[:, :top_k]
    kept = expected.shape[1]
    assert np.array_equal(found[:, :kept], expected)
    assert np.allclose(scores[:, :kept], np.take_along_axis(products, expected, axis=1), atol=1e-4)
    assert (found[:, kept:] == -1).all()


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
    assert searcher.invalid_rows == 3, "3, 10**12 and -7; -1 is how FAISS says that there was no more"


def test_each_query_gets_as_many_hits_as_it_asked_for():
    pieces = [Passage(f"p{n}", f"d{n}", "t", f"word{n}") for n in range(9)]
    embedder = FakeEmbedder()
    index = ShardedIndex.build(embedder.encode([piece.text for piece in pieces]), 2)
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
    index, pieces = open_index(tmp_path / "index", corpus, FakeEmbedder())
    assert (len(index), len(index.shards)) == (10, 2)
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
            lambda corpus, index: (index / "shard-01.faiss").write_bytes(b"x"),
            "fake",
            "shard-01.faiss is missing or damaged",
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
    prepare(data, embedder)
    first = len(embedder.batches)
    prepare(data, embedder)
    assert len(embedder.batches) == first
    prepare(data, embedder, seed=1)
    assert len(embedder.batches) > first
