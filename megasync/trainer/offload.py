"""A trainer rank's memory on its GPU, given back for a while: the host keeps what it held.

The storages behind the tensors are emptied and later filled again, never replaced. So parameters, their views in
Megatron's buffers and the optimizer's views of those stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megasync.device import Device
from megasync.trainer.optimizer import Optimizer

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER)
# Tensors by kind, all that there are at the moment; a storage belongs to the first kind that names it.
Memory = Mapping[str, Sequence[torch.Tensor]]


def memory_of(models: Sequence, weights: Iterable[torch.Tensor], optimizer: Optimizer | None) -> Memory:
    """The memory of Megatron's ``models``, wrapped for training if there is an optimizer."""
    if optimizer is None:
        return {WEIGHTS: list(weights)}
    buffers = [buffer for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    kept = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    return {
        WEIGHTS: [*weights, *kept],
        GRADIENTS: [buffer.grad_data for buffer in buffers],
        OPTIMIZER: optimizer.tensors(),
    }


@dataclass(frozen=True)
class _Away:
    """An emptied storage: a tensor that it is behind, its size in bytes, and a copy of them unless they do not matter."""

    tensor: torch.Tensor
    nbytes: int
    copy: torch.Tensor | None


class Offload:
    """What of a rank's memory is away. Gradients come back as zeros, everything else as it was.

    Args:
        memory: gives the present tensors, those that are away included.
        device: on which they are; tensors elsewhere stay there.
    """

    def __init__(self, memory: Callable[[], Memory], device: Device) -> None:
        self._memory = memory
        self._device = device
        self._away: dict[str, list[_Away]] = {}

    def leave(self, *kinds: str) -> None:
        """Empties the memory of some kinds; nothing for those that are away already."""
        for kind, tensors in self._storages().items():
            if kind in kinds and kind not in self._away:
                self._away[kind] = [self._empty(tensor, copied=kind != GRADIENTS) for tensor in tensors]
        self._device.free_cache()

    def enter(self, *kinds: str) -> None:
        """Fills the memory of some kinds; nothing for those that are here."""
        for kind in kinds:
            for item in self._away.pop(kind, ()):
                item.tensor.untyped_storage().resize_(item.nbytes)
                whole = _bytes(item.tensor)
                if item.copy is None:
                    whole.zero_()
                else:
                    whole.copy_(item.copy)

    @contextmanager
    def present(self, *kinds: str) -> Iterator[None]:
        """Within it these kinds are here; afterwards those that were away are away again."""
        absent = [kind for kind in kinds if kind in self._away]
        self.enter(*absent)
        try:
            yield
        finally:
            self.leave(*absent)

    def nbytes(self) -> dict[str, int]:
        """Bytes of each kind that are here."""
        return {
            kind: sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            for kind, tensors in self._storages().items()
        }

    def _storages(self) -> dict[str, list[torch.Tensor]]:
        """For each kind, one tensor of each storage that belongs to it."""
        memory, taken = self._memory(), set()
        found: dict[str, list[torch.Tensor]] = {}
        for kind in KINDS:
            tensors = [tensor for tensor in memory.get(kind, ()) if tensor.device.type == self._device.kind]
            distinct = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
            found[kind] = [tensor for storage, tensor in distinct.items() if storage not in taken]
            taken |= distinct.keys()
        return found

    def _empty(self, tensor: torch.Tensor, copied: bool) -> _Away:
        nbytes, copy = tensor.untyped_storage().nbytes(), None
        if copied:
            copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.kind == "cuda")
            copy.copy_(_bytes(tensor))
        tensor.untyped_storage().resize_(0)
        return _Away(tensor, nbytes, copy)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage behind a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
