"""The tokens that a loss chooses among those of a whole optimizer step, on one rank or on several."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import torch
from waits import PATIENCE

from megasync.algorithms.choose import chooser_of
from megasync.algorithms.losses import StepTokens, random_keys
from megasync.config.schema import AlgorithmConfig


def chosen_of(
    config: AlgorithmConfig,
    logprobs: Sequence[float],
    old: Sequence[float],
    advantages: Sequence[float],
    step: int = 1,
    dealt: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor | None:
    """Bool [tokens]; None for a loss that chooses none. ``dealt`` are the tokens of each rank, in its order."""
    chooser = chooser_of(config)
    if chooser is None:
        return None
    values = [np.array(each, dtype=np.float64) for each in (logprobs, old, advantages)]
    if dealt is None:
        own = np.arange(len(logprobs))
        return torch.from_numpy(chooser(StepTokens(*values, random_keys(step, own // 4, own % 4), lambda sums: sums)))
    barrier, parts = Barrier(len(dealt)), {}

    def on_rank(rank: int) -> np.ndarray:
        def summed(sums):
            parts[rank] = sums
            barrier.wait(PATIENCE)
            total = np.sum([parts[other] for other in range(len(dealt))], axis=0)
            barrier.wait(PATIENCE)
            return total

        own = np.array(dealt[rank], dtype=np.int64)
        return chooser(StepTokens(*(each[own] for each in values), random_keys(step, own // 4, own % 4), summed))

    chosen = torch.zeros(len(logprobs), dtype=torch.bool)
    with ThreadPoolExecutor(len(dealt)) as pool:
        for own, found in zip(dealt, pool.map(on_rank, range(len(dealt))), strict=True):
            chosen[list(own)] = torch.from_numpy(found)
    return chosen
