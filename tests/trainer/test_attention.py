"""Packed attention is dense attention under the tree's mask, in value and in gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.trainer.attention import Segment, packed_attention, plan_attention
from megasync.trainer.batch import Sample, lengths_of, make_batch
from megasync.trainer.packing import Microbatch, plan_packing

CPU = torch.device("cpu")


def dense(query, key, value, segments):
    """The plain formula with a [tokens, tokens] mask."""
    tokens, heads, dim = query.shape
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for segment in segments:
        own = slice(segment.start, segment.start + segment.length)
        mask[own, own] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.prefix is not None:
            root = segments[segment.prefix]
            mask[own, root.start : root.start + root.length] = True
    repeat = heads // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeat, 1)) * dim**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
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
    return [
        torch.randn(tokens, heads, 8, generator=generator).to(dtype).requires_grad_() for heads in (6, 2, 2)
    ], torch.randn(tokens, 6, 8, generator=generator)


def differences(segments, dtype):
    """Largest difference of the outputs, and of each input's gradient."""
    tensors, weight = inputs(segments, dtype)
    out = packed_attention(*tensors, plan_attention(segments, CPU))
    grads = torch.autograd.grad((out * weight).sum(), tensors)
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    expected = dense(*wide, segments)
    expected_grads = torch.autograd.grad((expected * weight).sum(), wide)
    pairs = zip((out, *grads), (expected, *expected_grads), strict=True)
    return [((a.float() - b).abs().max() / b.abs().max().clamp(min=1.0)).item() for a, b in pairs]


@given(forests())
@settings(max_examples=30)
def test_float32_equals_dense_attention(segments):
    assert max(differences(segments, torch.float32)) < 1e-5


@given(forests())
@settings(max_examples=20)
def test_bfloat16_equals_dense_attention_to_its_precision(segments):
    assert max(differences(segments, torch.bfloat16)) < 0.03


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
    found = {}
    rows = iter(zip(batch.packed.rows.tolist(), batch.targets.tolist(), strict=True))
    for index, count in zip(microbatch.sequences, batch.counts, strict=True):
        found[index] = [
            (int(ids[row]), int(positions[row]), target) for row, target in (next(rows) for _ in range(count))
        ]
    assert found == {
        0: [(3, 2, 10), (11, 4, 12)],
        1: [(3, 2, 20)],
        2: [(30, 3, 31)],
        3: [(7, 0, 40), (40, 1, 41)],
    }
    assert batch.segments.tolist() == [i for i, count in enumerate(batch.counts) for _ in range(count)]


def test_tokens_after_the_last_scored_one_are_not_fed():
    sample = Sample.of([1], [5, 6, 7, 8, 9], [0, 2])
    assert sample.fed == 2
    batch = make_batch(Microbatch(((0,),), 3), [sample], index=0, multiple=1, device=CPU, flavour="te")
    assert batch.ids.tolist() == [[1, 5, 6]]
    assert batch.targets.tolist() == [5, 7]
    assert batch.packed.rows.tolist() == [0, 2]
    assert batch.packed.cu_seqlens_q.tolist() == [0, 3]
