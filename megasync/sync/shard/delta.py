"""Lossless deltas: only the elements that changed, few of them after a reinforcement-learning step in bfloat16.

A delta holds, for each block of 65,536 elements, how many changed, then 16-bit positions inside the block, then the new
values. That is 4 bytes for each changed bfloat16, so a delta pays while fewer than half of them changed.
"""

from __future__ import annotations

import torch

BLOCK = 1 << 16
# Parts of a delta begin at whole words, in bytes.
ALIGN = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """(delta as flat uint8, number of changed elements), or None when the delta would not be smaller than ``new``.

    Both tensors are flat, of the same dtype and length. Bits are compared, so NaN and signed zeros are preserved.
    """
    bits = _BITS[new.element_size()]
    differs = new.view(bits) != old.view(bits)
    size = delta_bytes(new.numel(), int(differs.count_nonzero()), new.element_size())
    if size >= new.numel() * new.element_size():
        return None
    places = differs.nonzero().view(-1)
    delta = torch.zeros(size, dtype=torch.uint8, device=new.device)
    counts, where, values = _parts(delta, new.numel(), places.numel(), new.dtype)
    counts.copy_(torch.bincount(places // BLOCK, minlength=counts.numel()))
    where.copy_(places % BLOCK - BLOCK // 2)
    torch.index_select(new, 0, places, out=values)
    return delta, places.numel()


def apply(delta: torch.Tensor, changed: int, target: torch.Tensor) -> None:
    """Makes ``target`` (flat) what ``encode`` saw as ``new``, if it is what ``encode`` saw as ``old``."""
    counts, where, values = _parts(delta, target.numel(), changed, target.dtype)
    starts = torch.arange(counts.numel(), device=target.device) * BLOCK
    places = where.long() + BLOCK // 2 + torch.repeat_interleave(starts, counts.long())
    target.index_copy_(0, places, values)


def _sizes(elements: int, changed: int, item_bytes: int) -> tuple[int, int, int]:
    blocks = -(-elements // BLOCK)
    return _aligned(4 * blocks), _aligned(2 * changed), _aligned(item_bytes * changed)


def delta_bytes(elements: int, changed: int, item_bytes: int) -> int:
    """Bytes of a delta."""
    return sum(_sizes(elements, changed, item_bytes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _parts(
    delta: torch.Tensor, elements: int, changed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a delta: counts int32 per block, places int16 (minus half a block), values."""
    blocks = -(-elements // BLOCK)
    counts_size, places_size, values_size = _sizes(elements, changed, dtype.itemsize)
    counts = delta[:counts_size].view(torch.int32)[:blocks]
    where = delta[counts_size : counts_size + places_size].view(torch.int16)[:changed]
    values = delta[counts_size + places_size :][:values_size].view(dtype)[:changed]
    return counts, where, values
