"""A FAISS index in several shards that are searched in parallel; what they find is merged exactly.

Row numbers count through the shards in their order. Invariant: with flat shards a search finds the very rows that one
index over all vectors would (rows of equal score may change places).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np


class ShardedIndex:
    """Over unit vectors, by inner product."""

    def __init__(self, shards: Sequence[faiss.Index]) -> None:
        if not shards:
            raise ValueError("an index needs at least one shard")
        self.shards = list(shards)
        self.dimension: int = shards[0].d
        # One thread per shard; row numbers of a shard begin where the one before it ends.
        self._all = faiss.IndexShards(self.dimension, True, True)
        for shard in self.shards:
            self._all.add_shard(shard)

    @classmethod
    def build(cls, vectors: np.ndarray, count: int) -> ShardedIndex:
        """`count` shards of nearly equal size over float32 [rows, dimension]; fewer where there are fewer rows."""
        shards = []
        for part in np.array_split(vectors, min(count, len(vectors))):
            shard = faiss.IndexFlatIP(vectors.shape[1])
            shard.add(np.ascontiguousarray(part, np.float32))
            shards.append(shard)
        return cls(shards)

    @classmethod
    def load(cls, files: Sequence[Path]) -> ShardedIndex:
        return cls([faiss.read_index(str(file)) for file in files])

    def save(self, folder: Path) -> list[Path]:
        files = [folder / f"shard-{number:02d}.faiss" for number in range(len(self.shards))]
        for file, shard in zip(files, self.shards, strict=True):
            faiss.write_index(shard, str(file))
        return files

    def __len__(self) -> int:
        return sum(shard.ntotal for shard in self.shards)

    def search(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 [queries, top_k], best first, and rows int64 [queries, top_k]; -1 where there was no more."""
        return self._all.search(np.ascontiguousarray(vectors, np.float32), top_k)
