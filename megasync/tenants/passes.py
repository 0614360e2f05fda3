"""Messages between the driver and ranks that train several models: passes and their results.

Every position of a sequence has targets: what the model predicts after the token there. numpy, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LossPass:
    """The sum of a loss of `tenants.sum_losses` over all positions; ``backward`` adds its gradients to earlier ones.

    Columns have all sequences one after another.
    """

    loss: str
    backward: bool
    # The number of tokens of each sequence, and of targets at each of its positions.
    lengths: Ints
    widths: Ints
    # [tokens]
    tokens: NDArray[np.int32]
    # [targets], position by position.
    targets: NDArray[np.int32]
    # [targets] by name.
    inputs: Mapping[str, Floats]

    @cached_property
    def sequences(self) -> list[NDArray[np.int32]]:
        """The tokens of each sequence."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1])

    @cached_property
    def target_starts(self) -> Ints:
        """Where the targets of each sequence begin, and the end."""
        return np.cumsum([0, *(self.lengths * self.widths)])

    def targets_of(self, index: int) -> NDArray[np.int32]:
        """The targets of a sequence, position by position."""
        return self.targets[self.target_starts[index] : self.target_starts[index + 1]]


# The most models that compute a microbatch together; their adapters and gradients are on the device then.
TOGETHER = 8


@dataclass(frozen=True)
class PassPart:
    """The results of one rank: those of the sequences that it reports, and its part of the sums of all."""

    sequences: tuple[int, ...]
    # Of each of these sequences, [targets].
    logprobs: tuple[Floats, ...]
    # Summed over its sequences.
    sums: Mapping[str, float]


# Tokens that sequences must share to be computed as one tree. The attention of a tree costs more than fewer are worth.
LEAST_PREFIX = 8


def shared_prefixes(sequences: Sequence[NDArray[np.int32]]) -> tuple[Ints, Ints]:
    """Groups of sequences that begin alike: the number of each one's group, and the tokens that its group shares.

    In lexicographic order every group is a run. The runs are those that save the most tokens, found by dynamic
    programming in O(n^2) for n sequences. A sequence alone shares all its tokens with itself.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].tobytes())
    # Of a run from each place to the present one: the tokens that it shares, and the most that is saved with it.
    prefixes, saved = np.zeros(0, np.int64), np.zeros(0, np.int64)
    begins: list[int] = []
    best = np.int64(0)
    for place, index in enumerate(order):
        if place:
            common = _common(sequences[order[place - 1]], sequences[index])
            prefixes = np.minimum(prefixes, common if common >= LEAST_PREFIX else 0)
        prefixes = np.append(prefixes, len(sequences[index]))
        # Before a run from `place` comes the best of all that end before it.
        saved = np.append(saved, best)
        savings = saved + prefixes * np.arange(place, -1, -1)
        # The shortest of equal ones.
        begins.append(place - int(savings[::-1].argmax()))
        best = savings.max()
    groups, shared = np.zeros(len(sequences), np.int64), np.zeros(len(sequences), np.int64)
    end = len(order)
    while end:
        begin = begins[end - 1]
        members = order[begin:end]
        groups[members] = members[0]
        shared[members] = min(_common(sequences[members[0]], sequences[index]) for index in members)
        end = begin
    return groups, shared


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of tokens with which both begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length
