"""Which responses become a group: every rule on its own, and none of them hands out what cannot be trained."""

import itertools
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trajectories import trajectory

from megasync.config.schema import GroupConfig
from megasync.rollout.drops import Dropped
from megasync.rollout.selection import Selection, overlong_share, widest_spread


def select(samples, *, count=2, longest=8, relative=True, **rules):
    counts = Counter()
    return Selection(GroupConfig(**rules), count, longest, relative).select(samples, counts), +counts


def cut(reward):
    return trajectory(reward=reward, finish_reason="length")


def whole(reward, tokens=2):
    return trajectory(reward=reward, tokens=tokens)


def rewards(group):
    return [t.reward for t in group]


# Over-long responses


def test_masked_overlong_responses_are_excluded_from_loss_and_baseline():
    group, counts = select([[whole(1.0)], [cut(1.0)], [whole(0.0)]], overlong="mask")
    assert (rewards(group), counts) == ([1.0, 0.0], {"responses_overlong": 1})


@pytest.mark.parametrize("kept", [0, 1])
def test_a_group_with_too_few_complete_responses_is_dropped_as_overlong(kept):
    group, counts = select([[cut(1.0)]] * (3 - kept) + [[whole(0.0)]] * kept, overlong="mask")
    assert (group, counts) == (Dropped("overlong"), {"responses_overlong": 3 - kept})


def test_an_unscored_group_is_reported_as_unscored_even_with_overlong_responses():
    group, _ = select([[cut(None)], [whole(None)]], overlong="mask")
    assert group.reason == "unscored"


def test_the_overlong_penalty_is_proportional_to_the_excess_length():
    samples = [[whole(1.0, tokens)] for tokens in (4, 5, 6, 8)]
    group, counts = select(samples, count=4, overlong="punish", overlong_tokens=4, overlong_penalty=2.0)
    assert (rewards(group), counts) == ([1.0, 0.5, 0.0, -1.0], {"responses_overlong": 3})


def test_overlong_responses_are_kept_unchanged_by_default():
    samples = [[cut(1.0)], [whole(0.0, 8)]]
    assert select(samples) == ([cut(1.0), whole(0.0, 8)], {})


@given(st.integers(0, 200), st.integers(1, 100), st.data())
def test_the_overlong_penalty_grows_monotonically_from_zero_to_one(length, longest, data):
    margin = data.draw(st.integers(1, longest))
    share = overlong_share(length, longest, margin)
    assert 0.0 <= share <= 1.0
    assert (share == 0.0) == (length <= longest - margin)
    assert (share == 1.0) == (length >= longest)
    assert share <= overlong_share(length + 1, longest, margin)


# More samples than needed


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7), st.data())
def test_widest_spread_selects_the_subset_with_maximal_variance(values, data):
    count = data.draw(st.integers(1, len(values)))
    chosen = widest_spread(values, count)
    assert chosen == sorted(set(chosen)) and len(chosen) == count
    best = max(statistics.pvariance(choice) for choice in itertools.combinations(values, count))
    assert statistics.pvariance([values[index] for index in chosen]) == pytest.approx(best)


def test_spread_selection_compares_samples_and_keeps_all_turns_of_each():
    samples = [[whole(0.5)], [whole(1.0), whole(1.0)], [whole(None)], [whole(0.0)], [whole(0.5)]]
    group, counts = select(samples, keep="spread", extra_samples=3)
    assert (rewards(group), counts) == ([1.0, 1.0, 0.0], {"samples_unused": 2})


def test_the_number_of_samples_started_and_awaited_depends_on_the_selection_rule():
    first = Selection(GroupConfig(extra_samples=3), 4, 8)
    spread = Selection(GroupConfig(extra_samples=3, keep="spread"), 4, 8)
    assert (first.samples_started, first.samples_awaited) == (7, 4)
    assert (spread.samples_started, spread.samples_awaited) == (7, 7)


# All rules together

SAMPLE = st.lists(
    st.builds(
        trajectory,
        reward=st.sampled_from([None, 0.0, 0.5, 1.0]),
        tokens=st.integers(1, 8),
        finish_reason=st.sampled_from(["stop", "length"]),
        trained=st.sampled_from([0, 1, 1]),
    ),
    max_size=2,
)
RULES = st.fixed_dictionaries(
    {
        "drop_uniform": st.booleans(),
        "keep": st.sampled_from(["first", "spread"]),
        "overlong": st.sampled_from(["keep", "mask", "punish"]),
        "overlong_tokens": st.integers(1, 8),
    }
)


@given(st.lists(SAMPLE, max_size=6), RULES, st.booleans())
def test_selection_returns_a_trainable_group_or_a_drop_reason(samples, rules, relative):
    group, counts = select(samples, relative=relative, **rules)
    assert all(count > 0 for count in counts.values())
    if isinstance(group, Dropped):
        assert group.reason in {"unscored", "lone_survivor", "all_solved", "all_failed", "uniform", "overlong"}
        return
    assert len(group) >= (2 if relative else 1)
    assert all(t.reward is not None and any(t.loss_mask) for t in group)
    if rules["overlong"] == "mask":
        assert all(t.finish_reason != "length" for t in group)
    if rules["drop_uniform"]:
        assert len(set(rewards(group))) > 1
