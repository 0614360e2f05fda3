"""Chunks of packed sequences as Transformer Engine gets them, and the positions of tokens in their sequences."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.trainer.batch import PackedTokens
from megasync.trainer.context import plan_context, split_tokens, visible
from megasync.trainer.layer_specs import chunked, positions

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=5)


def packed(lengths, **options):
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return PackedTokens("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, **options)


def seen(tokens, limit=None):
    """Which tokens attend to which, [tokens, tokens]."""
    place, total = positions(tokens, int(tokens.cu_seqlens_q[-1])), tokens.cu_seqlens_q
    sequence = torch.searchsorted(total, torch.arange(int(total[-1])), right=True)
    return (sequence[:, None] == sequence) & visible(place, place, None, limit)


@given(LENGTHS, st.integers(1, 40))
def test_tokens_of_cut_sequences_attend_to_those_of_their_chunk(lengths, size):
    tokens = packed(lengths)
    cut = chunked(tokens, size)
    assert torch.equal(seen(cut), seen(tokens, size))
    assert cut.max_seqlen_q == cut.max_seqlen_kv == min(size, max(lengths))
    assert int(cut.cu_seqlens_q.diff().max()) <= cut.max_seqlen_q
    assert chunked(tokens, size) is cut


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_ranks_that_share_sequences_know_the_positions_of_their_tokens(sizes, ranks):
    lengths = [2 * ranks * size for size in sizes]
    whole = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(positions(packed(lengths), len(whole)), whole)
    for rank, own in enumerate(split_tokens(lengths, ranks)):
        plan = plan_context(lengths, ranks, rank, torch.device("cpu"))
        assert torch.equal(positions(packed(lengths, plan=plan), len(own)), whole[own])
