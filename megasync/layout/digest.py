"""A checksum of a message, cheap enough to compute over every byte at both ends, on any device.

It detects what transport and bookkeeping can do to a message: a flipped bit; stale, missing or shifted parts; a part
of another version. Swapped words within 4 KiB keep their sum, and so do two flips of the highest bits of words. It
does not protect against forged messages.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Words of 8 bytes per block: one sum each, in one pass over memory.
BLOCK_WORDS = 512
MASK = (1 << 64) - 1


def digest(message: torch.Tensor) -> int:
    """64 bits for a contiguous tensor whose bytes are a multiple of 8: block sums, weighted by position."""
    words = message.view(-1).view(torch.uint8).view(torch.int64)
    full_words = words.numel() // BLOCK_WORDS * BLOCK_WORDS
    sums = words[:full_words].view(-1, BLOCK_WORDS).sum(1)
    if full_words < words.numel():
        sums = torch.cat([sums, words[full_words:].sum().view(1)])
    # Odd weights: any change of a block's sum changes the total.
    weights = torch.arange(1, 2 * sums.numel(), 2, device=sums.device)
    return int((sums * weights).sum().item()) & MASK


def signed(value: int) -> int:
    """The same 64 bits as a number that fits an int64 tensor; ``& MASK`` restores the digest."""
    return value - (1 << 64) if value >> 63 else value


def combine(parts: Mapping[int, int]) -> int:
    """One number for many messages, by tag. The numbers of disjoint sets of messages add up to that of all (`MASK`)."""
    return sum(((value + tag) * (2 * tag + 1) for tag, value in parts.items()), 0) * 0x9E3779B97F4A7C15 & MASK
