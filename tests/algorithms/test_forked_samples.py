"""A sample that forked is trained as one that did not: every estimator gives its tokens the same advantages."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_samples import Sample, advantages, group_of

from megasync.buffer.payload import in_memory
from megasync.config.builtin import ADVANTAGES
from megasync.config.schema import AlgorithmConfig
from megasync.errors import TrainingError
from megasync.trainer.tables import divisor_of, trajectory_table

REWARD = st.integers(-4, 4).map(lambda n: n / 4)
NUMBER = st.floats(-2, 2)
WEIGHTS = {"exact": 1.0, "brief": 0.5}
# Of estimators with penalties, and the options of those that have any.
OPTIONS = {"gae": {"gamma": 0.9, "lam": 0.8}}
PENALISED = [name for name in ADVANTAGES if name not in ("dpo", "gdpo", "gpg")]


@st.composite
def samples(draw, penalised: bool = False):
    parts = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))

    def of_tokens(values):
        return tuple(draw(st.lists(values, min_size=sum(parts), max_size=sum(parts))))

    return Sample(
        draw(REWARD),
        parts,
        of_tokens(st.one_of(st.none(), REWARD)) if draw(st.booleans()) else (),
        (("exact", draw(REWARD)), ("brief", draw(st.one_of(st.none(), NUMBER)))),
        of_tokens(NUMBER) if penalised else (),
        of_tokens(NUMBER),
        of_tokens(st.floats(0.1, 1)),
        draw(NUMBER),
        0.25,
    )


def steps(penalised: bool = False):
    return st.lists(st.lists(samples(penalised), min_size=2, max_size=4), min_size=1, max_size=3)


def assert_the_same_without_forks(groups, name, normalize_std, ranks):
    config = AlgorithmConfig(advantage=name, advantage_options=OPTIONS.get(name, {}), normalize_std=normalize_std)
    whole = advantages([[sample.whole for sample in group] for group in groups], config, WEIGHTS)
    actual = advantages(groups, config, WEIGHTS, ranks)
    for one, other in zip(chain(*actual), chain(*whole), strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=40)
@given(groups=steps(), normalize_std=st.booleans(), ranks=st.integers(1, 3))
def test_a_fork_changes_no_advantage(name, groups, normalize_std, ranks):
    assert_the_same_without_forks(groups, name, normalize_std, ranks)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PENALISED)
@settings(max_examples=40)
@given(groups=steps(penalised=True), normalize_std=st.booleans(), ranks=st.integers(1, 3))
def test_a_fork_changes_no_advantage_with_penalties(name, groups, normalize_std, ranks):
    assert_the_same_without_forks(groups, name, normalize_std, ranks)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-7])
@pytest.mark.parametrize("name", [name for name, item in ADVANTAGES.items() if item.relative and not item.tokens])
def test_equal_samples_stay_equal_however_often_one_forked(name, reward):
    """A mean of three equal numbers may differ from them in its last bit."""
    group = [Sample(reward, (1, 1, 1)), Sample(reward, (2,)), Sample(reward, (1, 2, 1, 1, 1))]
    assert [part.tolist() for part in advantages([group], AlgorithmConfig(advantage=name))[0]] == [
        [0.0] * sample.tokens for sample in group
    ]


@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_grpo_process_without_rewards_of_tokens_is_grpo_whatever_the_penalties_of_tokens(penalty):
    group = [Sample(1.0, (3,), penalties=(penalty, 0.0, penalty)), Sample(0.0, (2, 2), penalties=(0.0, 0.0, 0.1, 0.0))]
    process, grpo = (advantages([group], AlgorithmConfig(advantage=name))[0] for name in ("grpo_process", "grpo"))
    assert [part.tolist() for part in process] == [pytest.approx(part.tolist()) for part in grpo]
    assert process[0][0] == pytest.approx(0.7071, abs=1e-4)


def test_a_group_of_one_sample_is_no_group_though_it_forked():
    leased = [in_memory(group_of([Sample(1.0, (2, 2))]))]
    with pytest.raises(TrainingError, match=r"needs the rewards of at least 2 sample\(s\) of a group, got 1"):
        trajectory_table(leased, AlgorithmConfig(), of_tokens=False)


def test_the_reward_of_a_sample_is_the_mean_of_those_of_its_trajectories():
    forked = group_of([Sample(1.0, (1, 1)), Sample(0.0, (1,))])
    forked.trajectories[0] = forked.trajectories[0].__class__(
        [1], [5], [1], [-0.5], [0], reward=0.5, sample=forked.trajectories[0].sample
    )
    table, step = trajectory_table([in_memory(forked)], AlgorithmConfig(advantage="rloo"), of_tokens=False)
    assert step.rewards.tolist() == [0.75, 0.0] and step.tokens.tolist() == [2, 1]
    assert table.advantages.tolist() == [0.75, 0.75, -0.75]


@pytest.mark.parametrize(
    "aggregation, sample_weight, divisor, sequences",
    [
        ("token", "sample", 7, [6, 6, 6, 1]),
        ("sequence", "sample", 2, [6, 6, 6, 1]),
        ("sequence", "trajectory", 4, [1, 2, 3, 1]),
        ("constant", "sample", 20, [6, 6, 6, 1]),
        ("constant", "trajectory", 40, [1, 2, 3, 1]),
    ],
)
def test_what_a_sample_weighs_is_a_choice(aggregation, sample_weight, divisor, sequences):
    config = AlgorithmConfig(aggregation=aggregation, sample_weight=sample_weight)
    table, _ = trajectory_table([in_memory(group_of([Sample(1.0, (1, 2, 3)), Sample(0.0, (1,))]))], config, False)
    assert divisor_of(table, config, longest=10) == divisor
    assert table.sequences.tolist() == sequences
    if aggregation == "sequence" and sample_weight == "sample":
        weights = np.bincount(table.samples, table.trained / table.sequences) / divisor
        assert weights.tolist() == [0.5, 0.5]
