"""Which responses become a group: every rule on its own, and none of them hands out what cannot be trained."""

import dataclasses
import itertools
import statistics
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trajectories import trajectory

from megasync.config.schema import GroupConfig
from megasync.rollout.selection import Dropped, Selection, overlong_share, widest_spread
from megasync.trajectory import TOKEN_REWARDS, of_sample


def select(samples, *, count=2, longest=8, relative=True, compared=(), **rules):
    counts = Counter()
    return Selection(GroupConfig(**rules), count, longest, relative, compared).select(samples, counts), +counts


def cut(reward):
    return trajectory(reward=reward, finish_reason="length")


def whole(reward, tokens=2):
    return trajectory(reward=reward, tokens=tokens)


def rewards(group):
    return [t.reward for t in group]


# Over-long responses


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


@pytest.mark.parametrize("parts", [(6,), (2, 4), (3, 2, 1)])
def test_the_overlong_penalty_is_for_all_tokens_of_a_sample_however_they_are_split(parts):
    forked = [whole(1.0, tokens) for tokens in parts]
    group, counts = select([forked, [whole(0.5, 2)]], overlong="punish", overlong_tokens=4)
    assert (rewards(group), counts) == ([0.5] * len(parts) + [0.5], {"responses_overlong": len(parts)})


def test_a_sample_of_which_a_part_was_cut_off_is_masked_as_a_whole():
    group, counts = select([[cut(1.0), whole(1.0)], [whole(0.0)], [whole(1.0)]], overlong="mask")
    assert (rewards(group), counts) == ([0.0, 1.0], {"responses_overlong": 2})


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


def test_spread_is_that_of_the_tasks_rewards_before_penalties():
    samples = [[whole(1.0)], [whole(0.5, 8)], [whole(0.0)]]
    group, _ = select(
        samples, keep="spread", extra_samples=1, overlong="punish", overlong_tokens=2, overlong_penalty=9.0
    )
    assert rewards(group) == [1.0, 0.0]


# Groups that teach nothing


@pytest.mark.parametrize("reward, reason", [(0.0, "all_failed"), (1.0, "all_solved"), (0.1, "uniform")])
def test_equal_answers_of_different_lengths_are_uniform_whatever_the_penalty(reward, reason):
    """Or groups of wrong answers would be trained on their lengths alone."""
    samples = [[whole(reward, 2)], [whole(reward, 8)], [whole(reward, 7)] * 3]
    assert select(samples, drop_uniform=True, overlong="punish", overlong_tokens=4)[0] == Dropped(reason)
    assert len(select(samples, overlong="punish", overlong_tokens=4)[0]) == 5


def test_a_sample_that_forked_is_one_survivor():
    assert select([[whole(1.0), whole(1.0)], [whole(None)]])[0].reason == "lone_survivor"
    kept = select([[whole(1.0), whole(1.0)], [whole(None)]], relative=False, drop_uniform=True)[0]
    assert rewards(kept) == [1.0, 1.0]


def test_groups_with_equal_sums_of_different_scores_are_kept_where_scores_are_compared():
    scores = [
        {"reward/a": 1.0, "reward/b": 0.0},
        {"reward/a": 0.0, "reward/b": 1.0},
        {"reward/a": 0.5, "reward/b": 0.5},
    ]
    samples = [[trajectory(reward=1.0, metrics=metrics)] for metrics in scores]
    assert select(samples, drop_uniform=True)[0] == Dropped("all_solved")
    assert len(select(samples, drop_uniform=True, compared=("a", "b"))[0]) == 3
    assert select(samples[:1] * 3, drop_uniform=True, compared=("a", "b"))[0] == Dropped("all_solved")
    missing = [*samples[:1], [trajectory(reward=1.0, metrics={"reward/a": 1.0})]]
    assert len(select(missing, drop_uniform=True, compared=("a", "b"))[0]) == 2


def test_groups_with_equal_sums_of_different_rewards_of_tokens_are_kept():
    def stepped(*given):
        array = {TOKEN_REWARDS: np.array(given, np.float32)}
        return [dataclasses.replace(whole(1.0, len(given)), arrays=array)]

    nan = float("nan")
    assert select([stepped(1.0, nan), stepped(nan, 1.0)], drop_uniform=True)[0] == Dropped("all_solved")
    assert len(select([stepped(1.0, 0.0), stepped(0.0, 1.0)], drop_uniform=True)[0]) == 2


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
    # Texts tell of which sample a trajectory is.
    samples = [[dataclasses.replace(t, text=str(number)) for t in sample] for number, sample in enumerate(samples)]
    group, counts = select(samples, relative=relative, **rules)
    assert all(count > 0 for count in counts.values())
    if isinstance(group, Dropped):
        assert group.reason in {"unscored", "lone_survivor", "all_solved", "all_failed", "uniform", "overlong"}
        return
    assert len({t.text for t in group}) >= (2 if relative else 1)
    assert all(t.reward is not None and any(t.loss_mask) for t in group)
    if rules["overlong"] == "mask":
        assert all(t.finish_reason != "length" for t in group)
    kept = [sample for sample in samples if any(t.text == u.text for t in sample for u in group)]
    if rules["drop_uniform"] and len(kept) > 1:
        # By the task's rewards, and not by penalties.
        assert (
            len({of_sample([t.reward for t in sample if t.reward is not None and t.trained()]) for sample in kept}) > 1
        )
