"""GRPO with rewards of steps, against its formula in plain Python, alone and on several ranks."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_rewards import longest_of, rows_of, step_of
from waits import PATIENCE

from megasync.algorithms.advantages import StepRewards, grpo, grpo_process

# Rewards by token, None without one; the last token of a response has one.
TOKEN = st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 4))
RESPONSE = st.tuples(st.lists(TOKEN, max_size=5), st.integers(-8, 8)).map(lambda parts: [*parts[0], parts[1] / 4])
GROUPS = st.lists(st.lists(RESPONSE, min_size=2, max_size=4), min_size=1, max_size=4)


def plain(groups, normalize_std):
    results = []
    for group in groups:
        given = [reward for response in group for reward in response if reward is not None]
        mean, scale = statistics.fmean(given), statistics.stdev(given) + 1e-6 if normalize_std else 1.0
        for response in group:
            scores = [0.0 if reward is None else (reward - mean) / scale for reward in response]
            results += [sum(scores[at:]) for at in range(len(scores))]
    return results


@given(groups=GROUPS, normalize_std=st.booleans())
def test_a_token_gets_what_is_still_to_come_compared_with_its_group(groups, normalize_std):
    actual = grpo_process(step_of(rows_of(groups), longest_of(groups)), normalize_std=normalize_std)
    assert actual.tolist() == pytest.approx(plain(groups, normalize_std), rel=1e-6, abs=1e-6)


@given(groups=GROUPS, ranks=st.integers(1, 3))
def test_ranks_with_parts_of_groups_find_the_same(groups, ranks):
    rows, barrier, parts = rows_of(groups), Barrier(ranks), {}

    def share(rank):
        def summed(sums):
            parts[rank] = sums
            barrier.wait(PATIENCE)
            total = np.sum([parts[other] for other in range(ranks)], axis=0)
            barrier.wait(PATIENCE)
            return total

        return grpo_process(step_of(rows[rank::ranks], longest_of(groups), summed), normalize_std=True)

    with ThreadPoolExecutor(ranks) as pool:
        shares = list(pool.map(share, range(ranks)))
    expected = grpo_process(step_of(rows, longest_of(groups)), normalize_std=True)
    of_rows = np.split(expected, np.cumsum([len(response) for _, response in rows])[:-1])
    for rank, actual in enumerate(shares):
        own = of_rows[rank::ranks]
        assert actual.tolist() == pytest.approx(np.concatenate(own).tolist() if own else [], abs=1e-9)


@given(rewards=st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=4), min_size=1, max_size=3))
def test_with_a_reward_for_each_response_it_is_grpo(rewards):
    rows = [(number, [None, reward]) for number, group in enumerate(rewards) for reward in group]
    groups, count = np.array([group for group, _ in rows]), len(rows)
    plain = grpo(StepRewards(np.array([r[1] for _, r in rows]), groups, np.full(count, 2)), normalize_std=True)
    actual = grpo_process(step_of(rows, np.full(len(rewards), 2)), normalize_std=True)
    assert actual.tolist() == pytest.approx(np.repeat(plain, 2).tolist(), rel=1e-4, abs=1e-4)
