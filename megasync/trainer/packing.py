"""Packs sequences into microbatches, identically on every rank and without communication. Plain Python, no torch.

Sequences with equal prompts share one *tree*: the prompt is computed once and every response continues it, which is
exact because attention is causal. Trees are packed into microbatches under a token budget, and microbatches are
assigned to data-parallel ranks by work. `assign` guarantees:

- Every tree is in exactly one counted microbatch.
- A microbatch exceeds the budget only if it is a single tree of a single sequence.
- Every rank gets the same number of microbatches, a multiple of the given number (an interleaved pipeline needs a
  multiple of its stages). None is empty: a masked copy of the cheapest tree fills a gap.
- The loads of two ranks differ by at most the work of the largest microbatch (`_to_ranks`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sample:
    """A prompt and a response as token ids; ``scored`` are the response offsets whose log-probs are computed.

    ``scored`` is ascending and not empty. The last scored token and those after it predict no scored token, so they are
    not fed to the model.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    scored: Sequence[int]

    @property
    def fed(self) -> int:
        """Number of response tokens that are fed to the model."""
        return self.scored[-1]


@dataclass(frozen=True)
class Tree:
    """A prompt and the samples (by index) that continue it. ``work`` is in units of one token's linear layers."""

    prompt: Sequence[int]
    members: tuple[int, ...]
    tokens: int
    work: float


@dataclass(frozen=True)
class Microbatch:
    """Trees that are computed in one pass. A masked copy (``counted`` false) is a filler that must not reach the loss.

    ``room`` is the number of tokens to pad to, so that ranks in lockstep have equal lengths; see `pad_alike`.
    """

    trees: tuple[Tree, ...]
    counted: bool = True
    room: int = 0

    @property
    def tokens(self) -> int:
        return sum(tree.tokens for tree in self.trees)

    @property
    def work(self) -> float:
        return sum(tree.work for tree in self.trees)


def pad_alike(per_rank: Sequence[Sequence[Microbatch]], ranks: Iterable[int]) -> list[list[Microbatch]]:
    """The microbatches of some data-parallel ranks, each padded to the longest of the same position."""
    peers = [per_rank[rank] for rank in ranks]
    rooms = [max(microbatch.tokens for microbatch in position) for position in zip(*peers, strict=True)]
    return [[replace(item, room=room) for item, room in zip(own, rooms, strict=True)] for own in peers]


def build_trees(
    samples: Sequence[Sample], parts: int, budget: int, attention_cost: float, share_prompts: bool
) -> list[Tree]:
    """Puts every sample on one tree. Splits trees at ``budget`` tokens, and into at least ``parts`` trees if possible.

    ``attention_cost`` is the work of one query-key pair, in units of one token's linear layers. Without
    ``share_prompts`` each sample is computed separately.
    """
    families: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        families.setdefault(tuple(sample.prompt) if share_prompts else (index,), []).append(index)
    shared = sum(
        len(samples[members[0]].prompt) + sum(samples[i].fed for i in members) for members in families.values()
    )
    limit = min(budget, -(-shared // parts))
    trees = []
    for members in families.values():
        prompt = samples[members[0]].prompt
        parts_of_tree = _split(members, samples, len(prompt), limit)
        trees.extend(_tree(prompt, part, samples, attention_cost) for part in parts_of_tree)
    return trees


def _split(members: list[int], samples: Sequence[Sample], prompt: int, limit: int) -> Iterable[list[int]]:
    part, tokens = [members[0]], prompt + samples[members[0]].fed
    for index in members[1:]:
        fed = samples[index].fed
        if tokens + fed > limit:
            yield part
            part, tokens = [], prompt
        part.append(index)
        tokens += fed
    yield part


def _tree(prompt: Sequence[int], members: list[int], samples: Sequence[Sample], attention_cost: float) -> Tree:
    length = len(prompt)
    fed = [samples[index].fed for index in members]
    tokens = length + sum(fed)
    pairs = length * (length + 1) / 2 + sum(n * length + n * (n + 1) / 2 for n in fed)
    return Tree(prompt, tuple(members), tokens, tokens + attention_cost * pairs)


def assign(trees: Sequence[Tree], ranks: int, budget: int, multiple: int = 1) -> list[list[Microbatch]]:
    """Packs trees into microbatches for each rank, balanced by work.

    Every rank gets the same number of microbatches: the smallest multiple of ``multiple`` that the budget allows.
    Raises ValueError if there are no trees.
    """
    if not trees:
        raise ValueError("nothing to pack")
    order = sorted(trees, key=lambda tree: -tree.work)
    # A lower bound: by volume, and because two trees of more than half the budget never share a microbatch.
    needed = max(-(-sum(tree.tokens for tree in trees) // budget), sum(2 * tree.tokens > budget for tree in trees))
    rounds = multiple * max(1, -(-needed // (ranks * multiple)))
    while (bins := _fill(order, rounds * ranks, budget)) is None:
        rounds += multiple
    filler = Microbatch((order[-1],), counted=False)
    return _to_ranks([Microbatch(tuple(content)) if content else filler for content in bins], ranks)


def _fill(order: list[Tree], count: int, budget: int) -> list[list[Tree]] | None:
    """Puts each tree into the least loaded of ``count`` bins with enough room; None if a tree fits nowhere.

    Loads start at zero and work is positive, so no bin gets a second tree while another is empty. A tree larger than
    the budget therefore fails only if no bin is empty, and it never shares its bin.
    """
    bins: list[list[Tree]] = [[] for _ in range(count)]
    heap = [(0.0, index, 0) for index in range(count)]
    for tree in order:
        full = []
        while heap:
            load, index, tokens = heapq.heappop(heap)
            if not bins[index] or tokens + tree.tokens <= budget:
                bins[index].append(tree)
                full.append((load + tree.work, index, tokens + tree.tokens))
                break
            full.append((load, index, tokens))
        else:
            return None
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _to_ranks(bins: list[Microbatch], ranks: int) -> list[list[Microbatch]]:
    """Assigns bins in rounds of similar work; in each round the heaviest bin goes to the least loaded rank.

    Pairing ascending loads with descending work never makes two ranks differ by more than before, or by more than two
    bins of the round differ. This gives the bound in the module docstring.
    """
    order = sorted(bins, key=lambda item: -item.work)
    loads = [0.0] * ranks
    per_rank: list[list[Microbatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        least_first = sorted(range(ranks), key=lambda rank: loads[rank])
        for rank, item in zip(least_first, order[start : start + ranks], strict=True):
            per_rank[rank].append(item)
            loads[rank] += item.work
    return per_rank
