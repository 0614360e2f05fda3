"""The weights that verl receives: an iterator of whole tensors (which also exposes the shards), or parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megasync.sync.stream import Shards, empty_part, empty_tensors, pack_part, place_part

# Bytes of whole tensors in memory at a time.
EXPORT_BYTES = 256 * 2**20


class Weights(Iterator[tuple[str, torch.Tensor]]):
    """Iterates over the whole tensors of the model under Hugging Face names, on every rank, in the order of the plan.

    Every rank of the default process group must consume every tensor, in step with the others: collectives assemble a
    bucket, and each ends before the next begins. ``held`` opens a context in which this rank's shards are on their
    device. Takes the memory of one bucket and of one rank's part of it.
    """

    def __init__(self, held: Callable[[], AbstractContextManager[Shards]]) -> None:
        self.held = held
        self._tensors = self._stream()

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self.held() as shards:
            device = next(iter(shards.params.values())).device
            for bucket in shards.plan(EXPORT_BYTES).buckets:
                tensors = empty_tensors(bucket, device)
                for owner in bucket.contributions:
                    part = empty_part(bucket, owner, device)
                    if owner == shards.rank:
                        pack_part(bucket, shards, part)
                    if dist.get_world_size() > 1:
                        dist.broadcast(part, owner)
                    place_part(bucket, owner, part, tensors)
                yield from tensors.items()


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
