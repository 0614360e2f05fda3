"""Every estimator against its formula in plain Python; `test_against_verl.py` compares them with verl's."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megasync.algorithms import estimator_of
from megasync.algorithms.advantages import StepRewards, TokenRewards, dpo
from megasync.algorithms.choose import takes_tokens
from megasync.config.builtin import ADVANTAGES
from megasync.config.schema import AlgorithmConfig

RESPONSE = st.tuples(st.floats(-10, 10), st.integers(1, 50))
# Greedy responses have the number of their group times this as a reward.
BASELINE = 0.5
STEPS = st.lists(st.lists(RESPONSE, min_size=2, max_size=6), min_size=1, max_size=5)


def step_of(groups) -> StepRewards:
    rows = [(reward, number, tokens) for number, group in enumerate(groups) for reward, tokens in group]
    rewards, numbers, tokens = zip(*rows, strict=True)
    numbers = np.array(numbers)
    return StepRewards(np.array(rewards, dtype=float), numbers, np.array(tokens), baselines=BASELINE * numbers)


def advantages(groups, name: str, **changes) -> list[float]:
    return estimator_of(AlgorithmConfig(advantage=name, **changes))(step_of(groups)).tolist()


def whitened(values: list[float], groups) -> list[float]:
    """By tokens, each of which carries its response's value."""
    tokens = [count for group in groups for _, count in group]
    spread = [value for value, count in zip(values, tokens, strict=True) for _ in range(count)]
    mean, variance = statistics.fmean(spread), statistics.variance(spread)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def plain(groups, name: str, normalize_std: bool) -> list[float]:
    """The formulas of docs/advantages.md."""
    if name == "reinforce_plus_plus":
        return whitened([reward for group in groups for reward, _ in group], groups)
    if name == "remax":
        return [reward - BASELINE * number for number, group in enumerate(groups) for reward, _ in group]
    results = []
    # The share of the samples in groups with spread.
    count, spread = sum(map(len, groups)), sum(len(group) for group in groups if len({r for r, _ in group}) > 1)
    for group in groups:
        rewards, lengths = [reward for reward, _ in group], [tokens for _, tokens in group]
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
        scale = std if normalize_std else 1.0
        if name in ("grpo", "gdpo"):
            results += [(reward - mean) / scale for reward in rewards]
        elif name == "grpo_passk":
            best, second = sorted(rewards, reverse=True)[:2]
            first = rewards.index(best)
            results += [(best - second) / scale if place == first else 0.0 for place in range(len(rewards))]
        elif name == "dpo":
            pair = (rewards.index(max(rewards)), rewards.index(min(rewards)))
            signs = [(place == pair[0]) - (place == pair[1]) for place in range(len(rewards))]
            results += [0.1 * 0.5 * sign for sign in signs]
        elif name == "rloo":
            results += [
                reward - statistics.fmean([*rewards[:place], *rewards[place + 1 :]])
                for place, reward in enumerate(rewards)
            ]
        elif name == "opo":
            baseline = sum(r * n for r, n in zip(rewards, lengths, strict=True)) / sum(lengths)
            results += [reward - baseline for reward in rewards]
        elif name == "gpg":
            results += [count / max(1, spread) * (reward - mean) for reward in rewards]
        else:
            results += [reward - mean for reward in rewards]
    return whitened(results, groups) if name in ("reinforce_plus_plus_baseline", "gdpo") else results


@pytest.mark.parametrize("name", [name for name, item in ADVANTAGES.items() if not item.tokens])
@given(groups=STEPS, normalize_std=st.booleans())
def test_an_estimator_follows_its_formula(name, groups, normalize_std):
    actual = advantages(groups, name, normalize_std=normalize_std)
    # Rewards that nearly agree are divided by nearly nothing.
    apart = all(max(r for r, _ in g) - min(r for r, _ in g) > 0.01 or len({r for r, _ in g}) == 1 for g in groups)
    if apart or name not in ("grpo", "grpo_passk", "gdpo"):
        assert actual == pytest.approx(plain(groups, name, normalize_std), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", [name for name, item in ADVANTAGES.items() if item.relative and not item.tokens])
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 8), other=STEPS)
def test_equal_rewards_of_a_group_say_nothing(name, reward, size, other):
    results = advantages([[(reward, place + 1) for place in range(size)], *other], name)
    if name not in ("reinforce_plus_plus_baseline", "gdpo"):
        assert results[:size] == [0.0] * size
    else:
        assert len(set(results[:size])) == 1


def test_a_single_response_can_be_enough():
    assert advantages([[(1.0, 3)], [(0.0, 3)]], "reinforce_plus_plus") == pytest.approx([0.9129, -0.9129], abs=1e-4)
    assert advantages([[(1.0, 1)]], "reinforce_plus_plus") == [0.0]


@pytest.mark.parametrize("name", [name for name, item in ADVANTAGES.items() if not (item.tokens or item.baseline)])
def test_steps_without_a_comparison_have_advantages_of_exactly_zero(name):
    # The mean of 0.1 over the tokens is not exactly 0.1.
    assert advantages([[(0.1, 3), (0.1, 7), (0.1, 11)], [(0.1, 2), (0.1, 5)]], name) == [0.0] * 5
    assert advantages([[(1.0, 3)]], name) == [0.0]
    empty = StepRewards(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert estimator_of(AlgorithmConfig(advantage=name))(empty).tolist() == []


def doubled(step: StepRewards, *, factor: float = 2.0, normalize_std: bool) -> np.ndarray:
    """An estimator of a user's own."""
    assert normalize_std
    return step.rewards * factor


def test_a_users_own_estimator_gets_its_options_and_the_keys_that_it_names():
    own = f"{__name__}:doubled"
    assert advantages([[(1.0, 1)]], own) == [2.0]
    assert advantages([[(1.0, 1)]], own, advantage_options={"factor": 3.0}) == [3.0]


def halved(step: TokenRewards) -> np.ndarray:
    """One of tokens."""
    return step.rewards / 2


def test_a_users_own_estimator_of_tokens_says_so_by_its_annotation_or_by_a_critic():
    own = {name: AlgorithmConfig(advantage=f"{__name__}:{name}") for name in ("doubled", "halved")}
    assert {name: takes_tokens(config, critic=False) for name, config in own.items()} == {
        "doubled": False,
        "halved": True,
    }
    assert all(takes_tokens(config, critic=True) for config in own.values())
    assert not takes_tokens(AlgorithmConfig(), critic=True)


def test_each_reward_function_is_normalised_by_itself():
    """A reward a thousand times larger counts no more than its weight says; a missing score counts nothing."""
    groups, tokens = np.array([0, 0, 0, 1, 1]), np.array([3, 1, 2, 1, 4])
    parts = {"correct": np.array([1.0, 0, 0, 1, 0]), "style": np.array([2000.0, 5000, math.nan, 1000, 1000])}
    weights = {"correct": 2.0, "style": 0.5}
    step = StepRewards(np.zeros(5), groups, tokens, parts, weights)
    third, half = math.sqrt(1 / 3), math.sqrt(1 / 2)
    correct = [2 / 3 / third, -1 / 3 / third, -1 / 3 / third, 0.5 / half, -0.5 / half]
    style = [-half, half, 0.0, 0.0, 0.0]
    total = [2 * a + b / 2 for a, b in zip(correct, style, strict=True)]
    spread = [value for value, count in zip(total, tokens, strict=True) for _ in range(count)]
    mean, deviation = statistics.fmean(spread), statistics.stdev(spread)
    actual = estimator_of(AlgorithmConfig(advantage="gdpo"))(step)
    assert actual.tolist() == pytest.approx([(value - mean) / deviation for value in total], rel=1e-4)


@given(
    ratios=st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=2, max_size=5),
    beta=st.floats(0.01, 2),
    seed=st.integers(0, 99),
)
def test_the_gradient_of_dpo_is_that_of_the_preference_loss(ratios, beta, seed):
    """Of a group with distinct rewards; each response has its tokens' log-ratios to the reference."""
    rewards = np.random.default_rng(seed).permutation(len(ratios)).astype(np.float64)
    best, worst = int(rewards.argmax()), int(rewards.argmin())
    leaves = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in ratios]
    margin = beta * (leaves[best].sum() - leaves[worst].sum())
    torch.nn.functional.softplus(-margin).backward()
    step = StepRewards(
        rewards,
        np.zeros(len(ratios), dtype=np.int64),
        np.array([len(each) for each in ratios]),
        log_ratios=np.array([sum(each) for each in ratios]),
    )
    for leaf, advantage in zip(leaves, dpo(step, beta=beta), strict=True):
        expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert (-advantage * torch.ones_like(leaf)).tolist() == pytest.approx(expected.tolist(), abs=1e-9)
