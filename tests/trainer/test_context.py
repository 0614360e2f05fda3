"""Sequences that several ranks share: who holds which tokens, and what cannot be shared."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.trainer.batch import Sample, lengths_of, make_batch
from megasync.trainer.context import split_tokens
from megasync.trainer.packing import plan_packing

CPU = torch.device("cpu")


@given(chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4), ranks=st.integers(1, 4))
def test_ranks_share_the_tokens_and_the_work_of_every_sequence(chunks, ranks):
    lengths = [2 * ranks * size for size in chunks]
    parts = split_tokens(lengths, ranks)
    assert sorted(parts.flatten().tolist()) == list(range(sum(lengths)))
    first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    positions = np.arange(sum(lengths)) - first
    # A query attends to as many keys as there are positions up to its own.
    assert len({int((positions[part] + 1).sum()) for part in parts}) == 1
    assert all((np.diff(part) > 0).all() for part in parts)


SAMPLES = [Sample.of([1, 2, 3], [10, 11, 12], [0, 2]), Sample.of([7], [40, 41]), Sample.of([5] * 9, [50], [0])]


@pytest.mark.parametrize("flavour", ["te", "local"])
@pytest.mark.parametrize("multiple", [1, 3])
def test_each_target_is_read_once_from_the_token_before_it(flavour, multiple):
    ranks = 2
    packing = plan_packing(
        lengths_of(SAMPLES), ranks=1, budget=100, attention_cost=0.0, share_prompts=False, chunks=2 * ranks
    )
    (microbatch,) = packing.microbatches(0)
    assert (packing.counted_tokens, microbatch.tokens) == (5 + 2 + 9, 8 + 4 + 12)
    results, kept, fed = {}, [], []
    for rank in range(ranks):
        batch = make_batch(
            microbatch, SAMPLES, index=0, multiple=multiple, device=CPU, flavour=flavour, context=(ranks, rank)
        )
        own = batch.ids[0]
        assert len(own) % multiple == 0 and len(own) * ranks == batch.packed.cu_seqlens_q[-1]
        assert (batch.packed.positions, batch.packed.plan is None) == (None, flavour == "te")
        fed += own[~batch.padding[0]].tolist()
        for place, row in zip(batch.kept.tolist(), batch.packed.rows.tolist(), strict=True):
            results[place] = (int(own[row]), int(batch.targets[place]))
        assert torch.equal(batch.own_targets, batch.targets[batch.kept])
        kept += batch.kept.tolist()
    assert sorted(kept) == list(range(5))
    assert sorted(fed) == sorted(
        token for each in SAMPLES for token in [*each.prompt, *each.response[: each.response_inputs]]
    )
    expected = {0: [(3, 10), (11, 12)], 1: [(7, 40), (40, 41)], 2: [(5, 50)]}
    assert [results[place] for place in range(5)] == [
        pair for index in microbatch.sequences for pair in expected[index]
    ]
