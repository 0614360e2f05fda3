"""The weights that verl receives: an iterator of whole tensors (which also exposes the shards), or parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from megasync.sync.stream import Shards, stream_tensors

# Bytes of whole tensors in memory at a time.
EXPORT_BYTES = 256 * 2**20


class Weights(Iterator[tuple[str, torch.Tensor]]):
    """Iterates over the whole tensors of the model under Hugging Face names, on every rank.

    All ranks must consume all tensors. ``held`` opens a context in which this rank's shards are on their device.
    """

    def __init__(self, held: Callable[[], AbstractContextManager[Shards]]) -> None:
        self.held = held
        self._tensors = self._stream()

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self.held() as shards:
            yield from stream_tensors(shards, EXPORT_BYTES)


class LiveWeights:
    """Looks like a model to verl's trainer with separate servers, which copies and restores its parameters.

    ``held`` is as in `Weights`.
    """

    def __init__(self, held: Callable[[], AbstractContextManager[Shards]]) -> None:
        self._held = held

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters themselves, which are on their device until the iterator is exhausted."""
        with self._held() as shards:
            yield from shards.params.items()
