"""Advantages from a critic's values and the critic's loss: plain formulas and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_rewards import with_values

from megasync.algorithms.advantages import gae
from megasync.algorithms.value_loss import explained_variance, value_loss

NUMBER = st.floats(-3, 3)
# Responses of (reward, value) by token.
RESPONSES = st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=7), min_size=1, max_size=5)
RATE = st.floats(0.1, 1)


def step_of(responses):
    flat = np.array([token for response in responses for token in response], dtype=np.float64)
    return with_values(flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, responses)]))


@given(responses=RESPONSES, gamma=RATE, lam=RATE)
def test_gae_is_the_sum_of_discounted_errors(responses, gamma, lam):
    expected = []
    for response in responses:
        values = [value for _, value in response] + [0.0]
        errors = [reward + gamma * values[t + 1] - values[t] for t, (reward, _) in enumerate(response)]
        expected += [sum((gamma * lam) ** k * d for k, d in enumerate(errors[t:])) for t in range(len(errors))]
    assert gae(step_of(responses), gamma=gamma, lam=lam).tolist() == pytest.approx(expected, abs=1e-9)


@given(responses=RESPONSES)
def test_without_discounts_the_return_is_what_is_still_to_come(responses):
    step = step_of(responses)
    returns = (gae(step) + step.values).tolist()
    expected = [sum(r for r, _ in response[t:]) for response in responses for t in range(len(response))]
    assert returns == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_gradient_is_that_of_the_loss_and_masked_tokens_have_none(clip):
    drawn = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 8, generator=drawn, dtype=torch.float64)
    mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1])
    values[2] = returns[6] = torch.nan

    def loss(values):
        return value_loss(values, old_values=old, returns=returns, mask=mask, clip=clip)[0]

    leaf = values.clone().requires_grad_()
    loss(leaf).backward()
    for token in range(8):
        low, high = values.clone(), values.clone()
        low[token] -= 0.01
        high[token] += 0.01
        slope = (loss(high) - loss(low)).item() / 0.02
        assert leaf.grad is not None and leaf.grad[token].item() == pytest.approx(slope, abs=1e-2)


def test_explained_variance_is_1_for_perfect_values_and_0_for_a_constant():
    returns = torch.tensor([0.0, 1.0, 3.0])

    def explained(old):
        _, sums = value_loss(old, old_values=old, returns=returns, mask=torch.ones(3), clip=None)
        return explained_variance({name: value.item() for name, value in sums.items()})

    assert explained(returns) == pytest.approx(1.0)
    assert explained(torch.full((3,), 2.0)) == pytest.approx(0.0)
    empty = torch.zeros(0)
    none = value_loss(empty, old_values=empty, returns=empty, mask=empty, clip=None)
    assert explained_variance({name: value.item() for name, value in none[1].items()}) == 0.0
