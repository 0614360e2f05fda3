"""Which rows are left out: the built-in policy, histories, and a rollout with its buffer and ledger."""

import asyncio
import threading
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.buffer.groups import SCORES
from megasync.config.schema import DataConfig
from megasync.data.curriculum import Curriculum, RowHistory, by_success, curriculum_of
from megasync.errors import DataError
from megasync.rollout.selection import ALL_FAILED, ALL_SOLVED


def wants(curriculum, uid):
    return asyncio.run(curriculum.wants(uid))


def history(*scores, first=0):
    return RowHistory(tuple(map(float, scores)), tuple(range(first, first + len(scores))))


@pytest.mark.parametrize(
    ("scores", "epoch", "options", "wanted"),
    [
        ([0.5], 1, {}, True),
        ([1], 1, {}, False),
        ([1], 99, {}, False),
        ([1, 0.9], 2, {}, True),
        ([0.9], 1, {"solved": 0.8}, False),
        ([1], 1, {"patience": 2}, True),
        ([1, 1], 2, {"patience": 2}, False),
        ([0], 1, {}, False),
        ([0], 2, {}, False),
        ([0], 3, {}, True),
        ([0], 1, {"postpone": 0}, True),
        ([0.1], 1, {"hopeless": 0.2}, False),
        ([0.5, 0], 2, {"patience": 2}, True),
    ],
)
def test_solved_rows_are_left_out_and_hopeless_ones_postponed(scores, epoch, options, wanted):
    assert by_success(history(*scores), epoch, **options) is wanted


def test_a_row_without_a_score_is_wanted_and_scores_are_of_rows_not_uids():
    curriculum = Curriculum(by_success, 10)
    assert wants(curriculum, "0:3") and wants(curriculum, "5:3")
    curriculum.record("0:3", 1.0)
    assert not wants(curriculum, "1:3") and wants(curriculum, "1:4")
    curriculum.restore([("1:4", 1.0), ("1:3", 0.2)])
    assert wants(curriculum, "2:3") and not wants(curriculum, "2:4")


@pytest.mark.parametrize("patience", [1, 2, 17, 40])
def test_any_patience_is_remembered(patience):
    """A solved row is left out after exactly so many groups."""
    curriculum = Curriculum(partial(by_success, patience=patience), 10)
    for epoch in range(patience):
        assert wants(curriculum, f"{epoch}:0")
        curriculum.record(f"{epoch}:0", 1.0)
    assert not wants(curriculum, f"{patience}:0")


@given(
    groups=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12),
    patience=st.integers(1, 4),
)
def test_a_resumed_curriculum_judges_as_the_live_one(groups, patience):
    """Live, groups end in any order and may be generated again; the ledger has the newest score of each, by epoch."""
    live, resumed = (Curriculum(partial(by_success, patience=patience), 10) for _ in range(2))
    for epoch, score in groups:
        live.record(f"{epoch}:0", score)
    resumed.restore((f"{epoch}:0", score) for epoch, score in sorted(dict(groups).items()))
    seen = [curriculum._history(0) for curriculum in (live, resumed)]
    assert seen[0] == seen[1] and list(seen[0].epochs) == sorted(dict(groups))
    assert [wants(live, f"{epoch}:0") for epoch in range(10)] == [wants(resumed, f"{epoch}:0") for epoch in range(10)]


def test_a_policy_that_blocks_is_abandoned_and_named(monkeypatch):
    monkeypatch.setattr("megasync.data.curriculum.JUDGE_SECONDS", 0.05)
    release = threading.Event()
    curriculum = Curriculum(lambda history, epoch: release.wait(), 10)
    curriculum.record("0:3", 1.0)
    with pytest.raises(DataError, match=r"data\.curriculum did not return within 0\.05 s, for .*1\.0.* in epoch 1"):
        wants(curriculum, "1:3")
    release.set()


def test_some_rows_are_generated_even_if_all_are_solved(caplog):
    curriculum = Curriculum(by_success, 3)
    for row in range(3):
        curriculum.record(f"0:{row}", 1.0)
    wanted = [wants(curriculum, f"{1 + n // 3}:{n % 3}") for n in range(12)]
    assert wanted == [False, False, False, True] * 3
    assert caplog.text.count("leaves out every row") == 1


def never(history, epoch, *, unless=9.0):
    return history.scores[-1] > unless


def test_a_policy_may_be_a_users_own():
    assert curriculum_of(DataConfig()) is None
    policy = curriculum_of(DataConfig(curriculum=f"{__name__}:never", curriculum_options={"unless": 0.5}))
    assert policy is not None and policy(history(0.6), 1) and not policy(history(0.5), 1)


def test_the_reasons_that_tell_a_score_are_those_of_the_rollout():
    assert {ALL_SOLVED: 1.0, ALL_FAILED: 0.0} == SCORES
