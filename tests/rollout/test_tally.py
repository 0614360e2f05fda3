"""Rollout metrics: no key lost, none made up, nothing changed by reading."""

import pytest

from megasync.rollout.tally import RolloutTally


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_metric_that_the_first_sample_lacks_is_kept_and_averaged_over_those_that_have_it(make_trajectory):
    tally = RolloutTally(window=4)
    tally.scored([make_trajectory(reward=1.0), make_trajectory(reward=0.0, metrics={"turns": 3.0})])
    tally.scored([make_trajectory(reward=None, metrics={"turns": 5.0}, finish_reason="length", tokens=6)])
    snapshot = tally.snapshot()
    assert snapshot["rollout/turns"] == 4.0
    assert snapshot["rollout/reward_mean"] == 0.5
    assert snapshot["rollout/truncated_share"] == pytest.approx(1 / 3)
    assert snapshot["rollout/response_length"] == pytest.approx(10 / 3)
    assert tally.snapshot().keys() == snapshot.keys()


def test_means_are_over_the_last_groups_and_absent_before_the_first(make_trajectory):
    tally = RolloutTally(window=2)
    assert "rollout/reward_mean" not in tally.snapshot()
    for reward in (0.0, 1.0, 3.0):
        tally.scored([make_trajectory(reward=reward)])
    assert tally.snapshot()["rollout/reward_mean"] == 2.0


def test_throughput_counts_the_last_half_minute_idle_time_included(make_trajectory):
    clock = FakeClock()
    tally = RolloutTally(window=2, clock=clock)
    assert tally.snapshot()["rollout/tokens_per_second"] == 0.0
    clock.now = 10.0
    tally.generated([make_trajectory(tokens=50), make_trajectory(tokens=50)])
    assert tally.snapshot()["rollout/tokens_per_second"] == 10.0
    clock.now = 20.0
    assert tally.snapshot()["rollout/tokens_per_second"] == 5.0
    clock.now = 41.0
    assert tally.snapshot()["rollout/tokens_per_second"] == 0.0
    assert tally.snapshot()["rollout/tokens"] == 100.0


def test_drops_are_counted_by_reason():
    tally = RolloutTally(window=2)
    tally.drops["uniform"] += 2
    tally.drops["reward_error"] += 1
    snapshot = tally.snapshot()
    assert (snapshot["rollout/groups_dropped"], snapshot["rollout/dropped_uniform"]) == (3.0, 2.0)
