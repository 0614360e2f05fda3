"""Buffers in which Transformer Engine exchanges tokens between tensor-parallel ranks while it computes a product.

A buffer has the tokens of all ranks of a group, [tokens, hidden]; each rank's own are a chunk of it. Here a rank first
exchanges and then computes, over torch.distributed. As on a GPU, a tensor of another size is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megasync.lab.rehearsal.cuda import current_device


def device_supports_multicast() -> bool:
    return True


def ubuf_built_with_mpi() -> bool:
    return False


def get_stream_priority_range() -> tuple[int, int]:
    return 0, -1


class CommOverlapHelper:
    """The groups over which buffers are exchanged: all ranks, and those that share a layer."""

    def __init__(self, world_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup) -> None:
        self.tensor_group = tensor_group


class CommOverlap:
    """One buffer. How Transformer Engine would overlap its exchange makes no difference here."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, helper: CommOverlapHelper, tp_size: int, *_: Any, **__: Any
    ) -> None:
        assert tp_size == helper.tensor_group.size()
        self._group = helper.tensor_group
        self._buffer = torch.empty(*shape, dtype=dtype, device=current_device())

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def with_cublasmp(self) -> bool:
        return False

    def is_fp8_ubuf(self) -> bool:
        return self._buffer.element_size() == 1

    def copy_into_buffer(self, tensor: torch.Tensor, local_chunk: bool = False) -> None:
        """Writes the tokens of all ranks, or this rank's own. Raises RuntimeError if they do not fill the place."""
        place = self._place(local_chunk)
        if tensor.numel() != place.numel() or tensor.element_size() != place.element_size():
            raise RuntimeError(f"a tensor {tuple(tensor.shape)} does not fill {tuple(place.shape)} of a buffer")
        place.copy_(tensor.reshape(place.shape))

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The tokens of all ranks, or this rank's own, not copied. Raises RuntimeError for a shape of another size."""
        place = self._place(local_chunk)
        if shape is not None and prod(shape) != place.numel():
            raise RuntimeError(f"a buffer of {tuple(place.shape)} was asked for as {tuple(shape)}")
        return place.view(*(shape or place.shape))

    def gather(self) -> None:
        """Gets the other ranks' tokens."""
        if not self._buffer.is_meta:
            chunks = list(self._buffer.chunk(self._group.size()))
            dist.all_gather(chunks, self._place(True).clone(), group=self._group)

    def scatter(self) -> torch.Tensor:
        """Sums up the buffers of all ranks, and returns this rank's tokens."""
        if not self._buffer.is_meta:
            dist.all_reduce(self._buffer, group=self._group)
        return self._place(True)

    def _place(self, local: bool) -> torch.Tensor:
        return self._buffer.chunk(self._group.size())[self._group.rank()] if local else self._buffer


class CommOverlapP2P(CommOverlap):
    """A buffer whose chunks go from rank to rank."""
