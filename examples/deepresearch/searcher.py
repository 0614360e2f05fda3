"""From queries to passages: embed, search the shards, look the rows up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepresearch.documents import Passage
from deepresearch.sharded_index import ShardedIndex


class Query(NamedTuple):
    text: str
    top_k: int


class Hit(NamedTuple):
    passage: Passage
    score: float


@dataclass(slots=True)
class Searcher:
    """Invariant: a row that the index has no passage for is left out, never another passage in its place.

    A search that found too little is filled up with -1, and Python would take that as the last passage.
    """

    embedder: Any
    index: ShardedIndex
    passages: Sequence[Passage]
    # Rows out of range so far: anything but 0 means that index and passages do not belong together.
    invalid_rows: int = 0

    def __call__(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """Up to `top_k` hits for each query, best first."""
        vectors = self.embedder.encode([query.text for query in queries])
        scores, rows = self.index.search(vectors, max(query.top_k for query in queries))
        return [self._hits(scores[number], rows[number])[: query.top_k] for number, query in enumerate(queries)]

    def _hits(self, scores: Sequence[float], rows: Sequence[int]) -> list[Hit]:
        hits = []
        for score, row in zip(scores, rows, strict=True):
            if 0 <= row < len(self.passages):
                hits.append(Hit(self.passages[row], float(score)))
            elif row != -1:
                self.invalid_rows += 1
        return hits
