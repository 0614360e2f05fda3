import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.algorithms.importance import importance_weights

LOGPROB = st.floats(-30, 0)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.booleans()), min_size=1, max_size=24)


def columns(tokens):
    trainer, behaviour, mask = zip(*tokens, strict=True)
    return torch.tensor(trainer), torch.tensor(behaviour), torch.tensor(mask, dtype=torch.int64)


@given(TOKENS, st.floats(1.0, 5.0))
def test_a_token_weight_is_the_capped_probability_ratio(tokens, cap):
    trainer, behaviour, mask = columns(tokens)
    weights, capped = importance_weights(trainer, behaviour, mask, level="token", cap=cap)
    for i in range(len(tokens)):
        ratio = math.exp(trainer[i].item() - behaviour[i].item())
        assert weights[i].item() == pytest.approx(min(ratio, cap) if mask[i] else 0.0, rel=1e-5)
        if abs(ratio - cap) > 1e-6 * cap:
            assert capped[i].item() == bool(mask[i] and ratio > cap)


@given(TOKENS, st.lists(st.integers(0, 4), min_size=24, max_size=24), st.floats(1.0, 5.0))
def test_a_sequence_weight_is_the_capped_geometric_mean_over_its_trained_tokens(tokens, ids, cap):
    trainer, behaviour, mask = columns(tokens)
    segments = torch.tensor(ids[: len(tokens)])
    weights, _ = importance_weights(trainer, behaviour, mask, level="sequence", cap=cap, segments=segments)
    for i in range(len(tokens)):
        mine = [j for j in range(len(tokens)) if segments[j] == segments[i] and mask[j]]
        if not mask[i]:
            assert weights[i] == 0
            continue
        mean = math.fsum(trainer[j].item() - behaviour[j].item() for j in mine) / len(mine)
        assert weights[i].item() == pytest.approx(min(math.exp(mean), cap), rel=1e-5)


def test_a_product_is_the_ratio_of_the_probabilities_of_a_sequence():
    trainer, behaviour = torch.log(torch.tensor([0.5, 0.4, 0.9])), torch.log(torch.tensor([0.25, 0.5, 0.9]))
    segments, mask = torch.tensor([0, 0, 1]), torch.ones(3)
    weights, _ = importance_weights(trainer, behaviour, mask, level="product", cap=5.0, segments=segments)
    torch.testing.assert_close(weights, torch.tensor([1.6, 1.6, 1.0]))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_a_masked_token_does_not_affect_other_tokens(level, garbage):
    trainer = torch.tensor([-1.0, garbage, -2.0])
    behaviour = torch.tensor([-1.5, -math.inf, -2.0])
    mask = torch.tensor([1, 0, 1])
    segments = torch.tensor([0, 0, 0])
    weights, capped = importance_weights(trainer, behaviour, mask, level=level, cap=2.0, segments=segments)
    assert weights[1] == 0 and not capped[1]
    expected = [math.exp(0.5), 1.0] if level == "token" else [math.exp(0.25)] * 2
    torch.testing.assert_close(weights[[0, 2]], torch.tensor(expected))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_with_zero_server_probability_gets_the_cap(level):
    weights, capped = importance_weights(
        torch.tensor([-1.0]), torch.tensor([-math.inf]), torch.ones(1), level=level, cap=2.0, segments=torch.tensor([0])
    )
    assert weights.tolist() == [2.0] and capped.tolist() == [True]


def test_half_precision_is_subtracted_in_float32():
    trainer, behaviour = torch.tensor([-10.0], dtype=torch.bfloat16), torch.tensor([-10.02])
    weights, _ = importance_weights(trainer, behaviour, torch.ones(1), level="token", cap=2.0)
    assert weights.dtype == torch.float32 and weights.item() == pytest.approx(math.exp(0.02), rel=1e-5)


def test_padding_may_carry_any_segment_index():
    weights, _ = importance_weights(
        torch.zeros(2), torch.zeros(2), torch.tensor([1, 0]), level="sequence", cap=2.0, segments=torch.tensor([0, -1])
    )
    assert weights.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_tokens_give_no_weights(level):
    empty = torch.zeros(0)
    weights, capped = importance_weights(
        empty, empty, empty, level=level, cap=2.0, segments=torch.zeros(0, dtype=torch.int64)
    )
    assert weights.shape == capped.shape == (0,)


def test_weights_carry_no_gradient():
    trainer = torch.zeros(3, requires_grad=True)
    assert not importance_weights(trainer, torch.zeros(3), torch.ones(3), level="token", cap=2.0).weights.requires_grad


def test_sequence_weights_need_segments():
    with pytest.raises(ValueError, match="segments"):
        importance_weights(torch.zeros(1), torch.zeros(1), torch.ones(1), level="sequence", cap=2.0)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'group'"):
        importance_weights(torch.zeros(1), torch.zeros(1), torch.ones(1), level="group", cap=2.0)


@given(TOKENS, st.floats(1.0, 5.0), st.floats(0.05, 1.0), st.booleans())
def test_outside_of_its_bounds_a_ratio_is_bounded_or_its_token_is_left_out(tokens, cap, floor, masks):
    trainer, behaviour, mask = columns(tokens)
    weights, outside = importance_weights(trainer, behaviour, mask, level="token", cap=cap, floor=floor, masks=masks)
    for i in range(len(tokens)):
        ratio = math.exp(trainer[i].item() - behaviour[i].item())
        if min(abs(ratio - cap), abs(ratio - floor)) < 1e-5:
            continue
        beyond = not floor <= ratio <= cap
        expected = 0.0 if masks and beyond else min(max(ratio, floor), cap)
        assert weights[i].item() == pytest.approx(expected if mask[i] else 0.0, rel=1e-5)
        assert outside[i].item() == bool(mask[i] and beyond)
