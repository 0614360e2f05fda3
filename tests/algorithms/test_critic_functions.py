"""Advantages from a critic's values and the critic's loss: plain formulas, gradients, and verl's functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.algorithms.advantages import TokenRewards
from megasync.algorithms.advantages.gae import gae
from megasync.algorithms.value_loss import explained_variance, value_loss

NUMBER = st.floats(-3, 3)
# Responses of (reward, value) by token.
RESPONSES = st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=7), min_size=1, max_size=5)
RATE = st.floats(0.1, 1)


def step_of(responses):
    flat = np.array([token for response in responses for token in response], dtype=np.float64)
    return with_values(flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, responses)]))


def with_values(rewards, values, starts):
    """Each response answers a prompt of its own."""
    groups = np.arange(len(starts) - 1)
    return TokenRewards(
        rewards, values, starts, np.ones(len(rewards), bool), groups, np.diff(starts), lambda sums: sums
    )


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


@pytest.fixture(scope="module")
def core_algos():
    pytest.importorskip("verl.version", reason="verl is not installed; run `bash launch/setup_extra.sh verl`")
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture
def batch():
    """Responses with tokens that are not trained, padded to [responses, longest]."""
    drawn = np.random.default_rng(3)
    mask = np.zeros((6, 9))
    for row, length in enumerate(drawn.integers(2, 10, 6)):
        mask[row, :length] = drawn.integers(0, 2, length)
        mask[row, length - 1] = 1
    tensors = {name: torch.from_numpy(drawn.normal(0, 1, (6, 9))).float() for name in ("values", "old", "returns")}
    return {"mask": torch.from_numpy(mask).float(), **tensors}


@pytest.mark.extra
def test_advantages_and_returns_are_verls(core_algos, batch):
    trained = batch["mask"].bool()
    rewards = torch.zeros_like(batch["mask"])
    # The last token of each is trained.
    ends = (trained * torch.arange(9)).argmax(dim=1)
    rewards[torch.arange(6), ends] = torch.arange(6.0)
    advantages, returns = core_algos.compute_gae_advantage_return(
        token_level_rewards=rewards, values=batch["old"], response_mask=batch["mask"], gamma=0.9, lam=0.8
    )
    starts = np.cumsum([0, *trained.sum(dim=1).tolist()])
    step = with_values(rewards[trained].double().numpy(), batch["old"][trained].double().numpy(), starts)
    found = gae(step, gamma=0.9, lam=0.8)
    assert (found + step.values).tolist() == pytest.approx(returns[trained].tolist(), abs=1e-5)
    # verl always normalises.
    whitened = (found - found.mean()) / np.sqrt(found.var(ddof=1) + 1e-8)
    assert whitened.tolist() == pytest.approx(advantages[trained].tolist(), abs=1e-4)


@pytest.mark.extra
@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_the_loss_is_verls(core_algos, batch, clip):
    trained = batch["mask"].bool()
    expected, clipped = core_algos.compute_value_loss(
        vpreds=batch["values"],
        values=batch["old"],
        returns=batch["returns"],
        response_mask=batch["mask"],
        cliprange_value=clip,
    )
    flat = {name: batch[name][trained] for name in ("values", "returns")}
    loss, sums = value_loss(
        **flat, old_values=batch["old"][trained], mask=torch.ones(int(trained.sum())), clip=None if clip > 1 else clip
    )
    assert loss.item() / sums["tokens"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums["clip_fraction"].item() / sums["tokens"].item() == pytest.approx(clipped.item())


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
