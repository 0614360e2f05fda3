"""Several scores become one reward; a missing one neither counts as zero nor makes the rest small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.rewards.combine import combine

WEIGHT = st.floats(0.01, 100)
SCORE = st.floats(-100, 100)


@given(st.lists(st.tuples(WEIGHT, SCORE), min_size=1, max_size=5))
def test_with_all_scores_it_is_the_plain_weighted_sum(pairs):
    weights, scores = zip(*pairs, strict=True)
    assert combine(weights, scores) == sum(w * s for w, s in pairs)


@given(st.lists(st.tuples(WEIGHT, st.booleans()), min_size=1, max_size=5), SCORE)
def test_functions_that_agree_give_the_same_reward_whoever_of_them_answered(pairs, score):
    weights = [weight for weight, _ in pairs]
    reward = combine(weights, [score if answered else None for _, answered in pairs])
    if not any(answered for _, answered in pairs):
        assert reward is None
    else:
        assert reward == pytest.approx(score * sum(weights))
