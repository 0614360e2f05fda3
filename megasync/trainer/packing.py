"""Sequences into microbatches, the same on every rank without communication. Plain Python: no torch.

Sequences with equal prompts grow on one *tree*: the prompt is computed once and every response continues it, which is
exact because attention is causal. Trees are put into microbatches under a token budget, and microbatches are dealt to
data-parallel ranks by work. Guaranteed by `deal`: every tree is in exactly one counted microbatch; a microbatch holds
more tokens than the budget only when it is a single tree of a single sequence; every rank gets the same number of
microbatches, and none is empty (a masked copy of the cheapest tree fills a gap). Loads of any two ranks differ by at
most the work of the largest microbatch (`_to_ranks`). An interleaved pipeline asks for a number of microbatches that is
a multiple of its stages (``rounds``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sample:
    """One response behind its prompt, as token ids; ``scored`` are the response offsets whose log-probs are wanted.

    ``scored`` ascends and is not empty. Tokens behind the last scored one, and that one itself, predict nothing that is
    wanted and are not fed to the model.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    scored: Sequence[int]

    @property
    def fed(self) -> int:
        """Response tokens that the model reads."""
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
    """Trees computed together; a masked copy (``counted`` false) keeps a rank in step and must not reach the loss.

    ``room`` are the tokens to pad to, so that ranks in lockstep have as many; see `level`.
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


def pack(
    samples: Sequence[Sample],
    *,
    ranks: int,
    budget: int,
    attention_cost: float,
    share_prompts: bool,
    rounds: int = 1,
) -> list[list[Microbatch]]:
    """Microbatches of each data-parallel rank.

    Args:
        budget: tokens per microbatch.
        attention_cost: work of one query-key pair, in units of one token's linear layers.
        share_prompts: grow trees; otherwise each sample is computed on its own.
        rounds: every rank gets a multiple of so many microbatches.
    """
    trees = grow_trees(samples, ranks * rounds, budget, attention_cost, share_prompts)
    return deal(trees, ranks, budget, rounds)


def level(dealt: Sequence[Sequence[Microbatch]], ranks: Iterable[int]) -> list[list[Microbatch]]:
    """The microbatches of some data-parallel ranks, with room for as many tokens as the largest of them in its turn."""
    together = [dealt[rank] for rank in ranks]
    rooms = [max(microbatch.tokens for microbatch in turn) for turn in zip(*together, strict=True)]
    return [[replace(item, room=room) for item, room in zip(mine, rooms, strict=True)] for mine in together]


def grow_trees(
    samples: Sequence[Sample], parts: int, budget: int, attention_cost: float, share_prompts: bool
) -> list[Tree]:
    """Every sample on one tree. A tree is cut at the budget, or where there would be less than one for each part."""
    families: dict[tuple, list[int]] = {}
    for index, sample in enumerate(samples):
        families.setdefault(tuple(sample.prompt) if share_prompts else (index,), []).append(index)
    shared = sum(
        len(samples[members[0]].prompt) + sum(samples[i].fed for i in members) for members in families.values()
    )
    limit = min(budget, -(-shared // parts))
    trees = []
    for members in families.values():
        prompt = samples[members[0]].prompt
        for part in _cut(members, samples, len(prompt), limit):
            trees.append(_tree(prompt, part, samples, attention_cost))
    return trees


def _cut(members: list[int], samples: Sequence[Sample], prompt: int, limit: int) -> Iterable[list[int]]:
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


def deal(trees: Sequence[Tree], ranks: int, budget: int, multiple: int = 1) -> list[list[Microbatch]]:
    """Trees into as few equal rounds of microbatches as the budget allows, a ``multiple`` of some number, balanced by
    work.

    Raises:
        ValueError: there are no trees.
    """
    if not trees:
        raise ValueError("nothing to pack")
    order = sorted(trees, key=lambda tree: -tree.work)
    # No fewer microbatches can do: by volume, and because two trees of more than half the budget never share one.
    needed = max(-(-sum(tree.tokens for tree in trees) // budget), sum(2 * tree.tokens > budget for tree in trees))
    rounds = multiple * max(1, -(-needed // (ranks * multiple)))
    while (bins := _fill(order, rounds * ranks, budget)) is None:
        rounds += multiple
    filler = Microbatch((order[-1],), counted=False)
    return _to_ranks([Microbatch(tuple(content)) if content else filler for content in bins], ranks)


def _fill(order: list[Tree], count: int, budget: int) -> list[list[Tree]] | None:
    """Each tree into the least loaded of ``count`` bins that has room, or None when one does not fit anywhere.

    Loads start at zero and work is positive, so no bin gets a second tree while another is empty; a tree larger than
    the budget is therefore refused only when all bins are taken, and it shares its bin with nothing.
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
    """Rounds of bins of similar work, in each round the heaviest to the rank that has least.

    Pairing ascending loads with descending work never makes two ranks differ by more than they did before, or than two
    bins of one round do; hence the bound in the module docstring.
    """
    order = sorted(bins, key=lambda item: -item.work)
    loads = [0.0] * ranks
    dealt: list[list[Microbatch]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        least_first = sorted(range(ranks), key=lambda rank: loads[rank])
        for rank, item in zip(least_first, order[start : start + ranks], strict=True):
            dealt[rank].append(item)
            loads[rank] += item.work
    return dealt
