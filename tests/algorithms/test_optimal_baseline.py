"""The token baseline with the least variance: its formula in plain Python, and its effect."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_rewards import longest_of, rows_of, step_of

from megasync.algorithms.advantages import optimal_token_baseline

# (reward, squared norm) by token.
TOKEN = st.tuples(st.integers(-8, 8).map(lambda n: n / 4), st.integers(1, 8).map(lambda n: n / 8))
GROUPS = st.lists(st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=4)


def found_for(groups):
    rewards = [[[reward for reward, _ in response] for response in group] for group in groups]
    norms = np.array([norm for group in groups for response in group for _, norm in response])
    return optimal_token_baseline(step_of(rows_of(rewards), longest_of(rewards), squared_norms=norms)).tolist()


@given(groups=GROUPS)
def test_each_position_has_the_mean_of_its_group_weighted_by_the_norms_up_to_it(groups):
    expected = []
    for group in groups:
        to_come = [[sum(r for r, _ in response[t:]) for t in range(len(response))] for response in group]
        up_to = [[sum(n for _, n in response[: t + 1]) for t in range(len(response))] for response in group]
        for own in to_come:
            for t, reward in enumerate(own):
                alive = [k for k, response in enumerate(group) if len(response) > t]
                weights = sum(up_to[k][t] for k in alive)
                baseline = sum(up_to[k][t] * to_come[k][t] for k in alive) / weights if len(alive) > 1 else 0.0
                expected.append(reward - baseline)
    assert found_for(groups) == pytest.approx(expected, abs=1e-6)


def test_many_responses_have_the_baseline_of_the_least_variance():
    """A softmax over three tokens, one in each response: rare ones have large gradients, and so more weight."""
    probabilities, rewards = np.array([0.9, 0.08, 0.02]), np.array([1.0, 0.0, 3.0])
    norms = 1 - 2 * probabilities + (probabilities**2).sum()
    tokens = np.repeat(np.arange(3), (1000 * probabilities).round().astype(int))
    step = step_of([(0, [rewards[token]]) for token in tokens], np.array([1]), squared_norms=norms[tokens])
    (actual,) = set(np.round(rewards[tokens] - optimal_token_baseline(step), 9).tolist())

    def second_moment(baseline):
        return probabilities @ (norms * (rewards - baseline) ** 2)

    best = min(np.linspace(0, 3, 3001), key=second_moment)
    assert actual == pytest.approx(best, abs=1e-3)
    assert second_moment(actual) < 0.95 * second_moment(probabilities @ rewards)
