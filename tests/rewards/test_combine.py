"""Several scores are combined into one reward; a missing score does not count as zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.rewards.function import combine

WEIGHT = st.floats(0.01, 100)
SCORE = st.floats(-100, 100)


@given(st.lists(st.tuples(WEIGHT, SCORE), min_size=1, max_size=5))
def test_all_scores_are_combined_as_a_weighted_sum(pairs):
    weights, scores = zip(*pairs, strict=True)
    assert combine(weights, scores) == sum(w * s for w, s in pairs)


@given(st.lists(st.tuples(WEIGHT, st.booleans()), min_size=1, max_size=5), SCORE)
def test_missing_scores_do_not_change_the_reward_if_all_others_are_equal(pairs, score):
    weights = [weight for weight, _ in pairs]
    reward = combine(weights, [score if present else None for _, present in pairs])
    if not any(present for _, present in pairs):
        assert reward is None
    else:
        assert reward == pytest.approx(score * sum(weights))
