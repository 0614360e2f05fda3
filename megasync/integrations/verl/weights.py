"""What verl gets as "the weights": whole tensors, from which megasync's own transfer takes the shards, or live parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from megasync.sync.stream import Shards, stream_tensors

# Bytes of whole tensors that exist at a time.
EXPORT_BYTES = 256 * 2**20


class Weights(Iterator[tuple[str, torch.Tensor]]):
    """The model under Hugging Face names, tensor by tensor, whole on every rank; all ranks must take all of them.

    Args:
        held: within its context, this rank's shards are on their device.
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
    """This rank's weights as verl's trainer with separate servers copies them and puts them back: it takes this for a
    model, and asks for its parameters.

    Args:
        held: as of `Weights`.
    """

    def __init__(self, held: Callable[[], AbstractContextManager[Shards]]) -> None:
        self._held = held

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters themselves, on their device until the last has been taken."""
        with self._held() as shards:
            yield from shards.params.items()
