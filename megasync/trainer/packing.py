"""Packs sequences into microbatches from their lengths alone, identically on every rank and without communication.

Sequences with equal prompts share one *tree*: the prompt is computed once and every response continues it, which is
exact because attention is causal. Trees are packed into microbatches under a token budget, and microbatches are
assigned to data-parallel ranks by work. `plan_packing` guarantees:

- Every tree is in exactly one counted microbatch.
- A microbatch exceeds the budget only if it is a single tree of a single sequence.
- Every rank gets the same number of microbatches, a multiple of the given number (an interleaved pipeline needs a
  multiple of its stages). None is empty: a masked copy of the cheapest tree fills a gap.
- The loads of two ranks differ by at most the work of the largest microbatch (`_to_ranks`).

The time is O(n log n) for n sequences. numpy, no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """The lengths by which sequences are packed; int64 arrays [sequences]."""

    # Equal where prompts are equal.
    prompts: Ints
    prompt_tokens: Ints
    # Response tokens that are inputs of the model: those before the last trained one.
    response_inputs: Ints

    def __getitem__(self, selection: Ints) -> Lengths:
        return Lengths(self.prompts[selection], self.prompt_tokens[selection], self.response_inputs[selection])


@dataclass(frozen=True)
class Microbatch:
    """Trees that are computed in one pass, each as the indices of its sequences."""

    trees: tuple[tuple[int, ...], ...]
    tokens: int
    # False for a masked copy, which must not reach the loss.
    counted: bool = True
    # The number of tokens to pad to, so that ranks in lockstep have equal lengths.
    room: int = 0
    # The number of the model whose adapters compute each tree; empty if one computes all.
    owners: tuple[int, ...] = ()

    @property
    def sequences(self) -> tuple[int, ...]:
        """The indices of all its sequences, in the order in which they are packed."""
        return tuple(index for tree in self.trees for index in tree)


@dataclass(frozen=True)
class Trees:
    """Arrays over trees. The sequences of tree i are ``members[starts[i]:starts[i + 1]]``."""

    members: Ints
    starts: Ints
    # With padding.
    tokens: Ints
    # In units of one token's linear layers.
    work: Floats
    # All tokens without padding.
    unpadded: int


@dataclass(frozen=True)
class Packing:
    """The microbatches of every rank, as arrays; `microbatches` returns those of one rank."""

    trees: Trees
    # The trees of microbatch i are `order[starts[i]:starts[i + 1]]`.
    order: Ints
    starts: Ints
    # Of each microbatch.
    tokens: Ints
    work: Floats
    # The microbatches of each rank in the order in which it computes them, [ranks, microbatches per rank].
    table: Ints
    # Microbatches from this number on are masked copies.
    counted: int

    @property
    def counted_tokens(self) -> int:
        """Tokens of all ranks' microbatches without masked copies and padding."""
        return self.trees.unpadded

    def microbatches(self, rank: int, peers: range | None = None, room: int = 0) -> list[Microbatch]:
        """The microbatches of a rank, each padded to ``room`` tokens.

        With ``peers``, each is padded to the longest of the same position among these ranks.
        """
        indices = self.table[rank]
        rooms = np.full_like(indices, room)
        if peers is not None:
            rooms = np.maximum(rooms, self.tokens[self.table[peers.start : peers.stop]].max(axis=0))
        return [
            Microbatch(tuple(self._trees(index)), int(self.tokens[index]), index < self.counted, room)
            for index, room in zip(indices.tolist(), rooms.tolist(), strict=True)
        ]

    def _trees(self, index: int) -> Iterator[tuple[int, ...]]:
        starts = self.trees.starts
        for tree in self.order[self.starts[index] : self.starts[index + 1]].tolist():
            yield tuple(self.trees.members[starts[tree] : starts[tree + 1]].tolist())


def plan_packing(
    lengths: Lengths,
    *,
    ranks: int,
    budget: int,
    attention_cost: float,
    share_prompts: bool,
    multiple: int = 1,
    chunks: int = 1,
    most_trees: int | None = None,
) -> Packing:
    """Packs sequences into microbatches for each rank, balanced by work.

    Every rank gets the same number of microbatches, a multiple of ``multiple``. Raises ValueError without sequences.

    Args:
        lengths: of all sequences that all ranks compute in this pass.
        budget: tokens of a microbatch.
        attention_cost: work of one query-key pair, in units of one token's linear layers.
        share_prompts: without it, each sequence is a tree of its own.
        chunks: each tree is padded to a multiple of as many tokens.
        most_trees: of a microbatch; None for no limit.
    """
    if not len(lengths.response_inputs):
        raise ValueError("nothing to pack")
    trees = build_trees(lengths, ranks * multiple, budget, attention_cost, share_prompts, chunks)
    by_work = np.argsort(-trees.work, kind="stable")
    tokens, work = trees.tokens[by_work], trees.work[by_work]
    if most_trees is not None:
        # Each takes a part of the budget of which there are no more than so many.
        tokens = np.maximum(tokens, -(-budget // most_trees))
    # A lower bound: by volume, and because two trees of more than half the budget never share a microbatch.
    needed = max(-(-int(tokens.sum()) // budget), int((2 * tokens > budget).sum()))
    rounds = multiple * max(1, -(-needed // (ranks * multiple)))
    while (bins := _fill(tokens, work, rounds * ranks, budget)) is None:
        rounds += multiple * -(-rounds // (STEPS * multiple))
    # Each gap is filled with the last tree, which has the least work.
    count, counted = rounds * ranks, min(rounds * ranks, len(tokens))
    bins = np.concatenate((bins, np.arange(counted, count)))
    by_work = np.concatenate((by_work, np.full(count - counted, by_work[-1])))
    by_bin = np.argsort(bins, kind="stable")
    order = by_work[by_bin]
    starts = np.concatenate(([0], np.cumsum(np.bincount(bins, minlength=count))))
    bin_tokens = np.add.reduceat(trees.tokens[order], starts[:-1])
    bin_work = np.bincount(bins, weights=trees.work[by_work], minlength=count).astype(np.float64, copy=False)
    return Packing(trees, order, starts, bin_tokens, bin_work, _to_ranks(bin_work, ranks), counted)


# If the trees do not fit, the number of microbatches grows by at least one part in this many, so attempts are few.
STEPS = 64


def build_trees(
    lengths: Lengths, parts: int, budget: int, attention_cost: float, share_prompts: bool, chunks: int = 1
) -> Trees:
    """Puts every sequence on one tree. Splits trees at ``budget`` tokens, and into at least ``parts`` if possible."""
    prompt, inputs = lengths.prompt_tokens, lengths.response_inputs
    if share_prompts:
        members, first = _split(lengths, parts, budget)
    else:
        members, first = np.arange(len(inputs)), np.ones(len(inputs), dtype=bool)
    starts = np.flatnonzero(first)
    prompt, inputs = prompt[members], inputs[members]
    root = prompt[starts]
    tokens = root + np.add.reduceat(inputs, starts)
    pairs = root * (root + 1) // 2 + np.add.reduceat(inputs * prompt + inputs * (inputs + 1) // 2, starts)
    padded = -(-tokens // chunks) * chunks
    return Trees(members, np.append(starts, len(members)), padded, padded + attention_cost * pairs, int(tokens.sum()))


def _split(lengths: Lengths, parts: int, budget: int) -> tuple[Ints, NDArray[np.bool_]]:
    """The sequences ordered by prompt, prompts in order of appearance, and which of them begin a new tree."""
    _, appearance, prompts = np.unique(lengths.prompts, return_index=True, return_inverse=True)
    members = np.argsort(appearance[prompts], kind="stable")
    shared = int(lengths.prompt_tokens[appearance].sum() + lengths.response_inputs.sum())
    limit = min(budget, -(-shared // parts))
    first = np.zeros(len(members), dtype=bool)
    family, tokens = -1, 0
    columns = (prompts[members], lengths.prompt_tokens[members], lengths.response_inputs[members])
    for place, (prompt, root, inputs) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if prompt != family or tokens + inputs > limit:
            first[place] = True
            family, tokens = prompt, root
        tokens += inputs
    return members, first


class _Bin(NamedTuple):
    """A bin's load (its work), number and room in tokens. Bins are ordered by load, then by number."""

    load: float
    number: int
    room: int


_NONE = _Bin(float("inf"), -1, -1)


class _Bins:
    """Open bins by room; finds the least loaded one with enough room in O(log budget).

    ``_least`` is a binary tree over all rooms from 0 to the budget. The node of a room, and every node above it, has
    the least loaded bin of its rooms.
    """

    def __init__(self, bins: list[_Bin], budget: int) -> None:
        self._leaves = 1 << budget.bit_length()
        self._least = [_NONE] * (2 * self._leaves)
        self._by_room: dict[int, list[_Bin]] = {}
        for item in bins:
            self.add(item)

    def add(self, item: _Bin) -> None:
        """Adds a bin. One without room never takes another tree and is left out."""
        if item.room > 0:
            heapq.heappush(self._by_room.setdefault(item.room, []), item)
            self._update(item.room)

    def take(self, tokens: int) -> _Bin | None:
        """Removes and returns the least loaded bin with room for ``tokens``; None if there is none."""
        least, node = self._least, self._leaves + tokens
        best = least[1]
        if best.room < tokens:
            best = least[node]
            while node > 1:
                if not node & 1:
                    best = min(best, least[node + 1])
                node >>= 1
            if best is _NONE:
                return None
        heapq.heappop(self._by_room[best.room])
        self._update(best.room)
        return best

    def _update(self, room: int) -> None:
        least, bins = self._least, self._by_room[room]
        node, best = self._leaves + room, bins[0] if bins else _NONE
        while node and least[node] != best:
            least[node] = best
            node >>= 1
            if node:
                best = min(least[2 * node], least[2 * node + 1])


def _fill(tokens: Ints, work: Floats, count: int, budget: int) -> Ints | None:
    """Puts each tree into the least loaded of ``count`` bins with enough room; None if a tree fits nowhere.

    Trees are in descending order of work. Loads start at zero and work is positive, so each of the first ``count``
    trees opens a bin. A tree larger than the budget therefore fits only there, and it never shares its bin.
    """
    bins = np.arange(len(tokens))
    rest = tokens[count:]
    rooms = budget - tokens[:count]
    if (rest > budget).any() or rest.sum() > rooms.clip(0).sum():
        return None
    opened = zip(work[:count].tolist(), range(count), rooms.tolist(), strict=False)
    free = _Bins([_Bin(*values) for values in opened], budget)
    placed = []
    for size, weight in zip(rest.tolist(), work[count:].tolist(), strict=True):
        least = free.take(size)
        if least is None:
            return None
        placed.append(least.number)
        free.add(_Bin(least.load + weight, least.number, least.room - size))
    bins[count:] = placed
    return bins


def _to_ranks(work: Floats, ranks: int) -> Ints:
    """Assigns bins in rounds of similar work; in each round the heaviest bin goes to the least loaded rank.

    Pairing ascending loads with descending work never makes two ranks differ by more than before, or by more than two
    bins of the round differ. This gives the bound in the module docstring. Returns the bins of each rank [ranks, bins].
    """
    rounds = np.argsort(-work, kind="stable").reshape(-1, ranks)
    table, loads = np.empty_like(rounds), np.zeros(ranks)
    for number, items in enumerate(rounds):
        least_first = np.argsort(loads, kind="stable")
        table[number, least_first] = items
        loads[least_first] += work[items]
    return table.T
