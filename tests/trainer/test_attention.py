"""Packed attention is dense attention under the tree's mask, in value and in gradient."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from megasync.trainer import context
from megasync.trainer.attention import Segment, TreeAttention, packed_attention, plan_attention
from megasync.trainer.batch import PackedTokens, Sample, lengths_of, make_batch
from megasync.trainer.context import split_tokens
from megasync.trainer.packing import Microbatch, plan_packing

CPU = torch.device("cpu")


def dense(query, key, value, sinks, segments, window, chunk=None):
    """The plain formula with a [tokens, tokens] mask, and without sinks if they are None."""
    tokens, heads, dim = query.shape
    positions = torch.cat(
        [
            torch.arange(segment.length) + (0 if segment.prefix is None else segments[segment.prefix].length)
            for segment in segments
        ]
    )
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for segment in segments:
        own = slice(segment.start, segment.start + segment.length)
        mask[own, own] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.prefix is not None:
            root = segments[segment.prefix]
            mask[own, root.start : root.start + root.length] = True
    if window is not None:
        mask &= positions[:, None] - positions < window
    if chunk is not None:
        mask &= positions[:, None] // chunk == positions // chunk
    repeat = heads // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeat, 1)) * dim**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None, None]))
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(repeat, 1))


@st.composite
def forests(draw):
    """Segments in packed order: prompts of all lengths, each with up to three continuations."""
    segments, start = [], 0
    for length, branches in draw(
        st.lists(st.tuples(st.integers(1, 90), st.lists(st.integers(1, 70), max_size=3)), min_size=1, max_size=5)
    ):
        root = len(segments)
        for size, prefix in [(length, None), *((branch, root) for branch in branches)]:
            segments.append(Segment(start, size, prefix))
            start += size
    return segments


def inputs(segments, dtype):
    tokens = sum(segment.length for segment in segments)
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, 6, 8), (tokens, 2, 8), (tokens, 2, 8), (6,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return tensors, torch.randn(tokens, 6, 8, generator=generator)


LIMIT = st.sampled_from([None, 1, 2, 7, 40, 200])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@given(segments=forests(), window=LIMIT, chunk=LIMIT, with_sinks=st.booleans())
@settings(max_examples=60)
def test_packed_attention_is_dense_attention_to_its_precision(dtype, tolerance, segments, window, chunk, with_sinks):
    """Also where a response begins in the middle of a chunk, and its prompt ends in an earlier one."""
    tensors, weight = inputs(segments, dtype)
    leaves = tensors if with_sinks else tensors[:3]
    sinks = tensors[3] if with_sinks else None
    out = packed_attention(*tensors[:3], plan_attention(segments, CPU), window=window, sinks=sinks, chunk=chunk)
    grads = torch.autograd.grad((out * weight).sum(), leaves)
    wide = [tensor.detach().float().requires_grad_() for tensor in leaves]
    expected = dense(*wide[:3], wide[3] if with_sinks else None, segments, window, chunk)
    expected_grads = torch.autograd.grad((expected * weight).sum(), wide)
    for actual, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (actual.float() - wanted).abs().max() < tolerance * wanted.abs().max().clamp(min=1.0)


@pytest.mark.parametrize(
    ("window_size", "skip", "windows"),
    [
        (None, None, [None] * 4),
        ((6, 0), None, [7] * 4),
        ((6, 0), [1, 0, 1, 0], [7, None, 7, None]),
        ((6, 0), 2, [7, None, 7, None]),
    ],
)
def test_layers_have_the_windows_and_sinks_of_megatrons_configuration(window_size, skip, windows):
    """A query of Megatron's attends to as many tokens before itself as its window has."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=48,
        num_attention_heads=6,
        num_query_groups=2,
        use_cpu_initialization=True,
        window_size=window_size,
        window_attn_skip_freq=skip,
        softmax_type="learnable",
    )
    segments = [Segment(0, 50, None), Segment(50, 20, 0)]
    (*tensors, sinks), _ = inputs(segments, torch.float32)
    packed = PackedTokens("thd", plan=plan_attention(segments, CPU))
    for layer, window in enumerate(windows, 1):
        attention = TreeAttention(config, layer_number=layer)
        with torch.no_grad():
            attention.softmax_offset.copy_(sinks)
        out = attention(*tensors, None, packed_seq_params=packed)
        torch.testing.assert_close(out, dense(*tensors, sinks, segments, window), atol=1e-5, rtol=0)


LIMITS = [(None, None), (1, None), (5, None), (16, None), (100, None), (None, 1), (None, 5)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("window", "chunk"), LIMITS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_ranks_that_share_sequences_have_the_windows_chunks_and_sinks_of_dense_attention(
    monkeypatch, ranks, window, chunk, with_sinks
):
    """All ranks in one process, which have gathered the keys and values of all."""
    lengths = [2 * ranks * size for size in (1, 7, 3)]
    starts = np.cumsum([0, *lengths[:-1]])
    segments = [Segment(int(start), length, None) for start, length in zip(starts, lengths, strict=True)]
    (query, key, value, sinks), weight = inputs(segments, torch.float32)
    own = torch.from_numpy(split_tokens(lengths, ranks))
    everything = torch.cat((key, value), dim=-1)[own.flatten()]
    monkeypatch.setattr(context, "gather_from_sequence_parallel_region", lambda mine, group: everything)
    parts = []
    for rank, mine in enumerate(own):
        plan = context.plan_context(lengths, ranks, rank, CPU)
        scores = sinks if with_sinks else None
        shares = (query[mine], key[mine], value[mine])
        parts.append(context.context_attention(*shares, plan, None, None, window, scores, chunk))
    out = torch.cat(parts)[own.flatten().argsort()]
    expected = dense(query, key, value, sinks if with_sinks else None, segments, window, chunk)
    leaves = [query, key, value, *([sinks] if with_sinks else [])]
    for actual, wanted in zip(
        (out, *torch.autograd.grad((out * weight).sum(), leaves)),
        (expected, *torch.autograd.grad((expected * weight).sum(), leaves)),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [2000])
def test_many_short_sequences_are_one_call(count):
    segments = [Segment(4 * i, 4, None) for i in range(count)]
    assert len(plan_attention(segments, CPU).rectangles) == 1


def test_very_different_lengths_do_not_pad_each_other():
    segments = [Segment(0, 1000, None), *(Segment(1000 + 10 * i, 10, None) for i in range(50))]
    plan = plan_attention(segments, CPU)
    assert len(plan.token) < 1.2 * 1500


def test_a_batch_reads_each_target_from_the_position_before_it():
    """Rows and targets of a tree point at the same tokens that the plain sequences would."""
    samples = [
        Sample.of([1, 2, 3], [10, 11, 12], [0, 2]),
        Sample.of([1, 2, 3], [20]),
        Sample.of([1, 2, 3], [30, 31], [1]),
        Sample.of([7], [40, 41]),
    ]
    packing = plan_packing(lengths_of(samples), ranks=1, budget=100, attention_cost=0.0, share_prompts=True)
    (microbatch,) = packing.microbatches(0)
    batch = make_batch(microbatch, samples, index=0, multiple=8, device=CPU, flavour="local")
    ids, positions = batch.ids[0], batch.packed.positions
    assert len(ids) % 8 == 0
    results = {}
    rows = iter(zip(batch.packed.rows.tolist(), batch.targets.tolist(), strict=True))
    for index, count in zip(microbatch.sequences, batch.counts, strict=True):
        results[index] = [
            (int(ids[row]), int(positions[row]), target) for row, target in (next(rows) for _ in range(count))
        ]
    assert results == {
        0: [(3, 2, 10), (11, 4, 12)],
        1: [(3, 2, 20)],
        2: [(30, 3, 31)],
        3: [(7, 0, 40), (40, 1, 41)],
    }
    assert batch.segments.tolist() == [i for i, count in enumerate(batch.counts) for _ in range(count)]


def test_padding_is_a_segment_of_its_own_that_repeats_tokens_and_routes():
    routes = np.arange(8, dtype=np.uint8).reshape(4, 1, 2)
    samples = [Sample.of([1, 2], [3, 4, 5], [1])]
    samples = [replace(samples[0], routes=routes)]
    microbatch = Microbatch(((0,),), 3, room=8)
    for flavour in ("te", "local"):
        batch = make_batch(microbatch, samples, index=0, multiple=1, device=CPU, flavour=flavour, replays=True)
        assert batch.ids.tolist() == [[1, 2, 3, 1, 2, 3, 1, 2]]
        assert batch.padding.tolist() == [[False] * 3 + [True] * 5]
        assert torch.equal(batch.routes[3:], batch.routes[[0, 1, 2, 0, 1]])
        assert (batch.targets.tolist(), batch.packed.rows.tolist()) == ([4], [2])
        if flavour == "te":
            assert batch.packed.cu_seqlens_q.tolist() == [0, 3, 8]
        else:
            assert batch.packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_tokens_after_the_last_scored_one_are_not_fed():
    sample = Sample.of([1], [5, 6, 7, 8, 9], [0, 2])
    assert sample.response_inputs == 2
    batch = make_batch(Microbatch(((0,),), 3), [sample], index=0, multiple=1, device=CPU, flavour="te")
    assert batch.ids.tolist() == [[1, 5, 6]]
    assert batch.targets.tolist() == [5, 7]
    assert batch.packed.rows.tolist() == [0, 2]
    assert batch.packed.cu_seqlens_q.tolist() == [0, 3]
