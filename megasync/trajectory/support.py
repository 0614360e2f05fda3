"""The support of truncated sampling: the tokens that `top_k`, `top_p` and `min_p` left to choose from, per position.

A server renormalises the probabilities of these tokens. A trainer that did so over the whole vocabulary would score
another distribution than the one that was sampled: each log-prob would be lower by what was cut off, and the gradient
would push up tokens that could not be sampled. So the server reports the support, and the trainer computes its softmax
over it (keep sampling mask of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasync.trajectory.runs import IntArray, int_array

# The largest `top_k` whose support SGLang reports (`--sampling-mask-max-tokens`).
MAX_SUPPORT = 4096


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that truncated sampling left to choose from, of consecutive positions."""

    # Numbers of tokens, [positions]; 0 where nothing was cut off.
    sizes: IntArray
    # The tokens of all positions, in order.
    ids: IntArray

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that do not match the ids."""
        if self.sizes.ndim != 1 or self.ids.ndim != 1 or (self.sizes.size and int(self.sizes.min()) < 0):
            raise ValueError(
                f"sizes {self.sizes.shape} and ids {self.ids.shape} must be one-dimensional, without a minus"
            )
        if (total := int(self.sizes.sum(dtype=np.int64))) != self.ids.size:
            raise ValueError(f"sizes add up to {total} tokens, and there are {self.ids.size} ids")

    @classmethod
    def of(cls, positions: Sequence[Sequence[int]]) -> Support:
        """The support of positions from the ids of each."""
        sizes = int_array([len(ids) for ids in positions])
        return cls(sizes, int_array([token for ids in positions for token in ids]))

    @classmethod
    def whole(cls, positions: int) -> Support:
        """The support of so many positions where nothing was cut off."""
        return cls(np.zeros(positions, np.int32), np.zeros(0, np.int32))

    @classmethod
    def join(cls, parts: Iterable[Support]) -> Support:
        """All positions of the parts, one after the other."""
        parts = [cls.whole(0), *parts]
        return cls(np.concatenate([part.sizes for part in parts]), np.concatenate([part.ids for part in parts]))

    def at(self, positions: NDArray[Any]) -> Support:
        """The support at the given positions, which ascend."""
        if len(positions) == len(self.sizes):
            return self
        wanted = np.zeros(len(self.sizes), dtype=bool)
        wanted[positions] = True
        return Support(self.sizes[positions], self.ids[np.repeat(wanted, self.sizes)])

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Support):
            return NotImplemented
        return np.array_equal(self.sizes, other.sizes) and np.array_equal(self.ids, other.ids)
