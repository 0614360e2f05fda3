import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.algorithms import group_advantages

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=32)


@given(REWARDS)
def test_without_normalisation_an_advantage_is_the_reward_minus_the_mean(rewards):
    mean = statistics.fmean(rewards)
    expected = [r - mean for r in rewards] if len(set(rewards)) > 1 else [0.0] * len(rewards)
    assert group_advantages(rewards, normalize_std=False) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1))
def test_with_normalisation_it_is_divided_by_the_sample_deviation(rewards):
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / std for r in rewards]
    assert group_advantages(rewards, normalize_std=True) == pytest.approx(expected, rel=1e-4)


@given(REWARDS, st.booleans())
def test_a_group_sums_to_zero_and_keeps_the_order_of_its_rewards(rewards, normalize_std):
    advantages = group_advantages(rewards, normalize_std)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    for a, b in pairwise(sorted(range(len(rewards)), key=rewards.__getitem__)):
        assert advantages[a] <= advantages[b]


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.booleans())
def test_equal_rewards_give_advantages_of_exactly_zero(reward, n, normalize_std):
    assert group_advantages([reward] * n, normalize_std) == [0.0] * n


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_of_one_response_is_refused(rewards):
    with pytest.raises(ValueError, match="at least two"):
        group_advantages(rewards, normalize_std=True)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(reward):
    with pytest.raises(ValueError, match=str(reward)):
        group_advantages([0.0, reward], normalize_std=True)
