"""Invariants of packing: every sequence exactly once, within the budget, ranks in lockstep and balanced."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.trainer.packing import Lengths, build_trees, plan_packing

COST = 0.01


def lengths(rows):
    """From (prompt, prompt tokens, fed tokens) of each sequence."""
    return Lengths(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


@st.composite
def batches(draw):
    """Groups of responses behind common prompts, in any order."""
    prompts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    members = draw(st.lists(st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 50)), min_size=1, max_size=60))
    return lengths([(prompt, prompts[prompt], fed) for prompt, fed in members])


arguments = {
    "batch": batches(),
    "ranks": st.integers(1, 5),
    "budget": st.integers(20, 300),
    "share": st.booleans(),
    "rounds": st.integers(1, 4),
}


def plan(batch, ranks, budget, share=True, rounds=1):
    return plan_packing(batch, ranks=ranks, budget=budget, attention_cost=COST, share_prompts=share, multiple=rounds)


def packed(*args, **kwargs):
    """The microbatches of every rank."""
    packing = plan(*args, **kwargs)
    return [packing.microbatches(rank) for rank in range(len(packing.table))]


def tokens_of(tree, batch):
    """Tokens of a tree, from the lengths of its sequences."""
    return batch.prompt_tokens[tree[0]] + batch.response_inputs[list(tree)].sum()


def work_of(tree, batch):
    """Each token's linear layers, and its attention to all tokens before it."""
    prompt, fed = int(batch.prompt_tokens[tree[0]]), [int(batch.response_inputs[index]) for index in tree]
    pairs = sum(range(prompt + 1)) + sum(sum(range(prompt + 1, prompt + n + 1)) for n in fed)
    return prompt + sum(fed) + COST * pairs


@given(batch=batches(), ranks=st.integers(1, 5), budget=st.integers(20, 300), most=st.integers(1, 9))
def test_microbatches_have_few_trees(batch, ranks, budget, most):
    packing = plan_packing(batch, ranks=ranks, budget=budget, attention_cost=COST, share_prompts=False, most_trees=most)
    actual = [microbatch for rank in range(ranks) for microbatch in packing.microbatches(rank)]
    assert max(len(microbatch.trees) for microbatch in actual) <= most
    assert sum(len(microbatch.trees) for microbatch in actual if microbatch.counted) == len(batch.response_inputs)
    for microbatch in actual:
        assert microbatch.tokens == sum(tokens_of(tree, batch) for tree in microbatch.trees)
        assert microbatch.tokens <= budget or len(microbatch.trees) == 1


@given(**arguments)
def test_every_sequence_is_counted_once_within_the_budget_on_ranks_in_lockstep(batch, ranks, budget, share, rounds):
    packing = plan(batch, ranks, budget, share, rounds)
    dealt = [packing.microbatches(rank) for rank in range(ranks)]
    items = [item for of_rank in dealt for item in of_rank]
    counted = [item for item in items if item.counted]
    assert sorted(index for item in counted for index in item.sequences) == list(range(len(batch.prompts)))
    for item in items:
        assert item.tokens == sum(tokens_of(tree, batch) for tree in item.trees) > 0
        assert item.tokens <= budget or len(item.sequences) == 1
    assert packing.counted_tokens == sum(item.tokens for item in counted)
    (count,) = {len(of_rank) for of_rank in dealt}
    assert count % rounds == 0
    works = [[sum(work_of(tree, batch) for tree in item.trees) for item in of_rank] for of_rank in dealt]
    loads = [sum(of_rank) for of_rank in works]
    assert max(loads) - min(loads) <= max(work for of_rank in works for work in of_rank) * (1 + 1e-9)


@given(**arguments)
def test_padded_microbatches_have_room_for_the_longest_of_their_position(batch, ranks, budget, share, rounds):
    packing = plan(batch, ranks, budget, share, rounds)
    peers = range(ranks // 2, ranks)
    padded = [packing.microbatches(rank, peers) for rank in peers]
    assert [[item.trees for item in own] for own in padded] == [
        [item.trees for item in packing.microbatches(rank)] for rank in peers
    ]
    for turn in zip(*padded, strict=True):
        assert {item.room for item in turn} == {max(item.tokens for item in turn)}


@given(**arguments)
def test_microbatches_are_padded_to_a_given_room(batch, ranks, budget, share, rounds):
    packing = plan(batch, ranks, budget, share, rounds)
    room = int(packing.tokens.max()) + 1
    for rank in range(ranks):
        assert [replace(item, room=0) for item in packing.microbatches(rank, room=room)] == packing.microbatches(rank)
        assert {item.room for item in packing.microbatches(rank, range(ranks), room)} == {room}


@given(**arguments)
def test_a_tree_is_one_prompt_and_only_sequences_that_have_it(batch, ranks, budget, share, rounds):
    trees = build_trees(batch, ranks * rounds, budget, COST, share)
    assert sorted(trees.members.tolist()) == list(range(len(batch.response_inputs)))
    for start, end, tokens, work in zip(trees.starts, trees.starts[1:], trees.tokens, trees.work, strict=False):
        tree = trees.members[start:end].tolist()
        assert len({batch.prompts[index] for index in tree}) == 1
        assert tokens == tokens_of(tree, batch)
        assert work == pytest.approx(work_of(tree, batch))
        assert share or len(tree) == 1


@given(**arguments)
def test_every_rank_plans_the_same(batch, ranks, budget, share, rounds):
    """Also if equal prompts have other numbers there."""
    renamed = Lengths(10**12 - 7 * batch.prompts, batch.prompt_tokens, batch.response_inputs)
    assert packed(batch, ranks, budget, share, rounds) == packed(renamed, ranks, budget, share, rounds)


@given(**arguments)
def test_each_tree_goes_to_the_least_loaded_microbatch_with_room(batch, ranks, budget, share, rounds):
    """The heaviest first; against the same rule with a loop over all microbatches."""
    trees = build_trees(batch, ranks * rounds, budget, COST, share)
    order = sorted(range(len(trees.tokens)), key=lambda tree: -trees.work[tree])
    packing = plan(batch, ranks, budget, share, rounds)
    count = packing.table.size
    bins = [[] for _ in range(count)]
    loads, rooms = [0.0] * count, [budget] * count
    for tree in order:
        fitting = [i for i in range(count) if not bins[i] or rooms[i] >= trees.tokens[tree]]
        least = min(fitting, key=lambda i: (loads[i], i))
        bins[least].append(tuple(trees.members[trees.starts[tree] : trees.starts[tree + 1]].tolist()))
        loads[least] += trees.work[tree]
        rooms[least] -= trees.tokens[tree]
    counted = [item.trees for rank in range(ranks) for item in packing.microbatches(rank) if item.counted]
    assert sorted(counted) == sorted(tuple(content) for content in bins if content)


def realistic(sequences, ranks, budget=32_768):
    """Responses with a long tail, eight to a prompt."""
    draw = np.random.default_rng(0)
    fed = draw.lognormal(np.log(6000) - 0.4, 0.9, sequences).clip(16, budget - 600).astype(np.int64)
    prompts = np.arange(sequences) // 8
    batch = Lengths(prompts, draw.integers(100, 600, prompts[-1] + 1)[prompts], fed)
    return plan(batch, ranks, budget, share=False)


@pytest.mark.parametrize("sequences, ranks", [(2048, 16), (8192, 64)])
def test_realistic_batches_fill_microbatches_and_ranks_evenly(sequences, ranks):
    packing = realistic(sequences, ranks)
    assert packing.counted_tokens / (packing.table.size * 32_768) >= 0.92
    loads = packing.work[packing.table].sum(axis=1)
    assert loads.max() / loads.mean() <= 1.01


def test_a_common_prompt_is_computed_once():
    (own,) = packed(lengths([(0, 100, 8)] * 8), 1, 1000)
    assert [item.tokens for item in own] == [100 + 8 * 8]


def test_a_group_is_split_if_a_rank_would_have_no_work():
    dealt = packed(lengths([(0, 10, 40)] * 8), 4, 10_000)
    assert all(item.counted for own in dealt for item in own)


def test_fewer_sequences_than_ranks_are_filled_up_with_masked_copies_of_the_cheapest():
    dealt = packed(lengths([(0, 10, 4), (1, 4, 1)]), 4, 100)
    assert sorted(item.trees for own in dealt for item in own if item.counted) == [((0,),), ((1,),)]
    assert [item.trees for own in dealt for item in own if not item.counted] == [((1,),)] * 2


def test_nothing_to_pack_is_an_error():
    with pytest.raises(ValueError, match="nothing to pack"):
        plan(lengths([]), 1, 100)


def test_long_sequences_that_share_no_microbatch_are_packed_one_by_one():
    dealt = packed(lengths([(i, 1, 59 + i % 7) for i in range(4000)]), 3, 100)
    assert len(dealt[0]) == -(-4000 // 3)
