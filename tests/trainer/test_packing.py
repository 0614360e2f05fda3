"""Invariants of packing: every sample exactly once, within the budget, ranks in lockstep and balanced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.trainer.packing import Sample, assign, build_trees, pad_alike


@st.composite
def batches(draw):
    """Groups of responses behind common prompts; a prompt's first token is its group, so that groups differ."""
    groups = draw(
        st.lists(
            st.tuples(st.integers(1, 60), st.lists(st.integers(1, 50), min_size=1, max_size=6)), min_size=1, max_size=12
        )
    )
    return [
        Sample([group] * prompt, [0] * length, list(range(length)))
        for group, (prompt, lengths) in enumerate(groups)
        for length in lengths
    ]


arguments = {
    "samples": batches(),
    "ranks": st.integers(1, 5),
    "budget": st.integers(20, 300),
    "share_prompts": st.booleans(),
}


def packed(samples, ranks, budget, share_prompts, rounds=1):
    return assign(build_trees(samples, ranks * rounds, budget, 0.01, share_prompts), ranks, budget, rounds)


@given(**arguments)
def test_every_sample_is_counted_exactly_once(samples, ranks, budget, share_prompts):
    dealt = packed(samples, ranks, budget, share_prompts)
    seen = [i for own in dealt for item in own if item.counted for tree in item.trees for i in tree.members]
    assert sorted(seen) == list(range(len(samples)))


@given(**arguments)
def test_a_microbatch_exceeds_the_budget_only_for_a_single_longer_sample(samples, ranks, budget, share_prompts):
    for own in packed(samples, ranks, budget, share_prompts):
        for item in own:
            alone = len(item.trees) == 1 and len(item.trees[0].members) == 1
            assert item.tokens <= budget or alone


@given(**arguments)
def test_ranks_have_equally_many_microbatches_and_none_is_empty(samples, ranks, budget, share_prompts):
    dealt = packed(samples, ranks, budget, share_prompts)
    assert len(dealt) == ranks
    assert len({len(own) for own in dealt}) == 1
    assert all(item.trees and item.tokens > 0 for own in dealt for item in own)


@given(**arguments, rounds=st.integers(1, 4))
def test_rounds_neither_lose_nor_duplicate_a_sample(samples, ranks, budget, share_prompts, rounds):
    dealt = packed(samples, ranks, budget, share_prompts, rounds)
    (count,) = {len(own) for own in dealt}
    assert count % rounds == 0
    assert all(item.trees for own in dealt for item in own)
    seen = [i for own in dealt for item in own if item.counted for tree in item.trees for i in tree.members]
    assert sorted(seen) == list(range(len(samples)))


@given(**arguments)
def test_padded_microbatches_have_room_for_the_largest_of_their_position(samples, ranks, budget, share_prompts):
    dealt = packed(samples, ranks, budget, share_prompts)
    mine = pad_alike(dealt, range(ranks - 1, ranks))
    assert [item.room for item in mine[0]] == [item.tokens for item in dealt[-1]]
    together = pad_alike(dealt, range(ranks))
    assert [[item.trees for item in own] for own in together] == [[item.trees for item in own] for own in dealt]
    for turn in zip(*together, strict=True):
        assert {item.room for item in turn} == {max(item.tokens for item in turn)}


@given(**arguments)
def test_loads_differ_by_at_most_the_heaviest_microbatch(samples, ranks, budget, share_prompts):
    dealt = packed(samples, ranks, budget, share_prompts)
    loads = [sum(item.work for item in own) for own in dealt]
    heaviest = max(item.work for own in dealt for item in own)
    assert max(loads) - min(loads) <= heaviest * (1 + 1e-9)


@given(**arguments)
def test_a_tree_is_one_prompt_and_only_samples_that_have_it(samples, ranks, budget, share_prompts):
    for tree in build_trees(samples, ranks, budget, 0.01, share_prompts):
        assert all(samples[index].prompt == tree.prompt for index in tree.members)
        assert tree.tokens == len(tree.prompt) + sum(samples[index].fed for index in tree.members)
        assert share_prompts or len(tree.members) == 1


def test_a_common_prompt_is_computed_once():
    samples = [Sample([1] * 100, [2] * 9, list(range(9))) for _ in range(8)]
    (own,) = packed(samples, 1, 1000, True)
    assert [item.tokens for item in own] == [100 + 8 * 8]


def test_a_group_is_split_if_a_rank_would_have_no_work():
    samples = [Sample([1] * 10, [2] * 41, list(range(41))) for _ in range(8)]
    dealt = packed(samples, 4, 10_000, True)
    assert all(item.counted for own in dealt for item in own)


def test_fewer_samples_than_ranks_are_filled_up_with_masked_copies():
    samples = [Sample([1] * 10, [2] * 5, list(range(5))), Sample([3] * 4, [2] * 2, [0, 1])]
    dealt = packed(samples, 4, 100, True)
    assert sum(item.counted for own in dealt for item in own) == 2
    assert sum(not item.counted for own in dealt for item in own) == 2


def test_tokens_after_the_last_scored_one_are_not_fed():
    assert Sample([1], [5, 6, 7, 8, 9], [0, 2]).fed == 2


def test_nothing_to_pack_is_an_error():
    with pytest.raises(ValueError, match="nothing to pack"):
        assign([], 1, 100)


def test_many_long_samples_are_packed_quickly():
    samples = [Sample([i], [0] * (60 + i % 7), [59 + i % 7]) for i in range(4000)]
    dealt = packed(samples, 3, 100, True)
    assert len(dealt[0]) == -(-4000 // 3)
