"""An exact index in several shards; what they find is merged.

Row numbers count through the shards in their order. A shard is a matrix on a device of this process, or a server
(`remote_shard.py`) that holds such a matrix. Invariant: a search finds the very rows that one matrix of all vectors
would (rows of equal score may change places).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

# Rows that a search lacks when fewer than `top_k` exist, and their score.
NO_ROW, NO_SCORE = -1, -np.inf


class Shard(Protocol):
    """Part of an index."""

    rows: int
    dimension: int

    def search(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 and rows int64, both [queries, at most top_k], best first."""
        ...


class MatrixShard:
    """Unit vectors on one device, compared by inner product; `first` is the number of the first row."""

    def __init__(self, vectors: np.ndarray, first: int, device: str = "cpu") -> None:
        """`vectors` is float32 [rows, dimension]; `device` is one of torch's, such as cuda:0."""
        import torch

        self.rows, self.dimension = vectors.shape
        self._first = first
        self._device = device
        self._vectors = torch.from_numpy(np.array(vectors, np.float32)).to(device)

    def search(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        import torch

        with torch.inference_mode():
            queries = torch.from_numpy(np.array(vectors, np.float32)).to(self._device)
            scores, rows = (queries @ self._vectors.T).topk(min(top_k, self.rows), dim=1)
        return scores.cpu().numpy(), rows.cpu().numpy() + self._first


class ShardedIndex:
    """Searches all shards at once, a thread for each."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        if not shards:
            raise ValueError("an index needs at least one shard")
        self.shards = list(shards)
        self.dimension = shards[0].dimension
        self._threads = ThreadPoolExecutor(len(shards), thread_name_prefix="shard")

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def search(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 [queries, top_k], best first, and rows int64 [queries, top_k]; NO_ROW where there is no more.

        Raises what a shard raises.
        """
        found = list(self._threads.map(lambda shard: shard.search(vectors, top_k), self.shards))
        scores, rows = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        padding = ((0, 0), (0, top_k - best.shape[1]))
        return (
            np.pad(np.take_along_axis(scores, best, 1), padding, constant_values=NO_SCORE),
            np.pad(np.take_along_axis(rows, best, 1), padding, constant_values=NO_ROW),
        )


def split(vectors: np.ndarray, count: int) -> list[np.ndarray]:
    """`count` parts of nearly equal size; fewer where there are fewer rows."""
    return np.array_split(vectors, min(count, len(vectors)))


def load_shards(files: Sequence[Path], devices: Sequence[str], only: int | None = None) -> list[MatrixShard]:
    """The shards of some `.npy` files, on the devices in turn; with `only` just the shard of this number."""
    shards, first = [], 0
    for number, file in enumerate(files):
        vectors = np.load(file, mmap_mode="r")
        if only in (None, number):
            shards.append(MatrixShard(vectors, first, devices[number % len(devices)]))
        first += len(vectors)
    return shards
