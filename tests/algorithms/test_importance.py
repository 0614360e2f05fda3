"""Weights that correct for another sampling policy; `test_policy_loss.py` compares them with their formulas."""

import math

import pytest
import torch

from megasync.algorithms.losses import importance_weights, rejected

LEVELS = ["token", "sequence", "product"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_with_zero_server_probability_gets_the_cap_and_padding_may_have_any_segment(level):
    trainer, behaviour = torch.tensor([-1.0, 0.0]), torch.tensor([-math.inf, 0.0])
    mask, segments = torch.tensor([1, 0]), torch.tensor([0, -1])
    weights, outside = importance_weights(trainer, behaviour, mask, level=level, cap=2.0, segments=segments)
    assert weights.tolist() == [2.0, 0.0] and outside.tolist() == [True, False]


def test_half_precision_is_subtracted_in_float32():
    trainer, behaviour = torch.tensor([-10.0], dtype=torch.bfloat16), torch.tensor([-10.02])
    weights, _ = importance_weights(trainer, behaviour, torch.ones(1), level="token", cap=2.0)
    assert weights.dtype == torch.float32 and weights.item() == pytest.approx(math.exp(0.02), rel=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_no_tokens_give_no_weights(level):
    empty = torch.zeros(0)
    segments = torch.zeros(0, dtype=torch.int64)
    weights, outside = importance_weights(empty, empty, empty, level=level, cap=2.0, segments=segments)
    assert weights.shape == outside.shape == (0,)


@pytest.mark.parametrize(("level", "word"), [("sequence", "segments"), ("product", "segments"), ("group", "'group'")])
def test_an_unknown_level_and_sequences_without_segments_are_refused(level, word):
    one = torch.zeros(1)
    with pytest.raises(ValueError, match=word):
        importance_weights(one, one, torch.ones(1), level=level, cap=2.0)
    with pytest.raises(ValueError, match=word):
        rejected(one, one, torch.ones(1), level=level, segments=None)
