"""Offloads a trainer rank's GPU memory to the host and brings it back.

The storages behind the tensors are emptied and later refilled, never replaced. So parameters, their views in Megatron's
buffers and the optimizer's views stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megasync.device import Device
from megasync.trainer.optimizer import Optimizer

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER)
# All current tensors by kind; a storage belongs to the first kind that lists it.
Memory = Mapping[str, Sequence[torch.Tensor]]


def memory_of(
    models: Sequence[DistributedDataParallel], weights: Iterable[torch.Tensor], optimizer: Optimizer | None
) -> Memory:
    """The memory of a rank; without an optimizer, only its weights."""
    if optimizer is None:
        return {WEIGHTS: list(weights)}
    buffers = buffers_of(models)
    kept = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    return {
        WEIGHTS: [*weights, *kept],
        GRADIENTS: [buffer.grad_data for buffer in buffers],
        OPTIMIZER: optimizer.tensors(),
    }


def buffers_of(models: Sequence[DistributedDataParallel]) -> list[Any]:
    """Megatron's buffers of parameters and gradients."""
    # Megatron replaces `Module.buffers`, a method, by its list of buffers.
    lists: list[Any] = [buffers for model in models for buffers in (model.buffers, model.expert_parallel_buffers)]
    return [buffer for buffers in lists for buffer in buffers]


@dataclass(frozen=True)
class _Offloaded:
    """An emptied storage: one of its tensors, its size in bytes, and a copy of its bytes unless they can be dropped."""

    tensor: torch.Tensor
    nbytes: int
    copy: torch.Tensor | None


class Offload:
    """Offloads kinds of memory to the host. Gradients are restored as zeros, everything else bitwise.

    ``memory`` returns the current tensors, including offloaded ones. ``device`` is the device to free; tensors on other
    devices are left alone.
    """

    def __init__(self, memory: Callable[[], Memory], device: Device) -> None:
        self._memory = memory
        self._device = device
        self._offloaded: dict[str, list[_Offloaded]] = {}

    def offload(self, *kinds: str) -> None:
        """Frees the device memory of these kinds; already offloaded ones are skipped."""
        for kind, tensors in self._storages().items():
            if kind in kinds and kind not in self._offloaded:
                self._offloaded[kind] = [self._empty(tensor, copied=kind != GRADIENTS) for tensor in tensors]
        self._device.free_cache()

    def restore(self, *kinds: str) -> None:
        """Brings these kinds back to the device; those already there are skipped."""
        for kind in kinds:
            for item in self._offloaded.pop(kind, ()):
                item.tensor.untyped_storage().resize_(item.nbytes)
                storage = _bytes(item.tensor)
                if item.copy is None:
                    storage.zero_()
                else:
                    storage.copy_(item.copy)

    @contextmanager
    def present(self, *kinds: str) -> Iterator[None]:
        """Restores these kinds within the context; those that were offloaded are offloaded again afterwards."""
        absent = [kind for kind in kinds if kind in self._offloaded]
        self.restore(*absent)
        try:
            yield
        finally:
            self.offload(*absent)

    def _storages(self) -> dict[str, list[torch.Tensor]]:
        """One tensor per storage, by the kind that the storage belongs to."""
        memory, taken = self._memory(), set()
        storages: dict[str, list[torch.Tensor]] = {}
        for kind in KINDS:
            tensors = [tensor for tensor in memory.get(kind, ()) if tensor.device.type == self._device.kind]
            distinct = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
            storages[kind] = [tensor for storage, tensor in distinct.items() if storage not in taken]
            taken |= distinct.keys()
        return storages

    def _empty(self, tensor: torch.Tensor, copied: bool) -> _Offloaded:
        nbytes, copy = tensor.untyped_storage().nbytes(), None
        if copied:
            copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.kind == "cuda")
            copy.copy_(_bytes(tensor))
        tensor.untyped_storage().resize_(0)
        return _Offloaded(tensor, nbytes, copy)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
