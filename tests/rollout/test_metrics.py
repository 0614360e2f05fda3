"""Rollout metrics: no key lost, none made up, nothing changed by reading."""

import pytest
from passing_time import Clock

from megasync.rollout.metrics import RolloutMetrics, WorkerMetrics, WorkerStatus
from megasync.rollout.selection import summarize


def test_a_metric_that_the_first_sample_lacks_is_kept_and_averaged_over_those_that_have_it(make_trajectory):
    metrics = RolloutMetrics(window=4)
    metrics.add_scored(summarize([make_trajectory(reward=1.0), make_trajectory(reward=0.0, metrics={"turns": 3.0})]))
    metrics.add_scored(
        summarize([make_trajectory(reward=None, metrics={"turns": 5.0}, finish_reason="length", tokens=6)])
    )
    snapshot = metrics.snapshot([])
    assert snapshot["rollout/turns"] == 4.0
    assert snapshot["rollout/reward_mean"] == 0.5
    assert snapshot["rollout/truncated_share"] == pytest.approx(1 / 3)
    assert snapshot["rollout/response_length"] == pytest.approx(10 / 3)
    assert metrics.snapshot([]).keys() == snapshot.keys()


def test_means_are_over_the_last_groups_and_absent_before_the_first(make_trajectory):
    metrics = RolloutMetrics(window=2)
    assert "rollout/reward_mean" not in metrics.snapshot([])
    for reward in (0.0, 1.0, 3.0):
        metrics.add_scored(summarize([make_trajectory(reward=reward)]))
    assert metrics.snapshot([])["rollout/reward_mean"] == 2.0


def test_throughput_counts_the_last_half_minute_idle_time_included(make_trajectory):
    clock = Clock()
    metrics = WorkerMetrics(clock)

    def rate():
        return metrics.status(0, {}).tokens_per_second

    assert rate() == 0.0
    clock.now = 10.0
    metrics.add_generated([make_trajectory(tokens=50), make_trajectory(tokens=50)])
    assert rate() == 10.0
    clock.now = 20.0
    assert rate() == 5.0
    clock.now = 41.0
    assert rate() == 0.0
    assert metrics.status(0, {}).tokens == 100


def test_counts_are_those_of_all_workers_and_no_lost_worker_takes_its_own_along():
    metrics = RolloutMetrics(window=2)
    first = WorkerStatus(
        3, 100, 10.0, 1, 2, {"samples_unused": 4}, {"rollout/invalid_answers": 1.0, "teachers/a/inflight": 2.0}
    )
    second = WorkerStatus(2, 50, 5.0, 1, 0, {"samples_unused": 1, "responses_overlong": 2}, {})
    both = metrics.snapshot([first, second])
    assert (both["rollout/tokens"], both["rollout/tokens_per_second"]) == (150.0, 15.0)
    assert (both["rollout/inflight_requests"], both["rollout/samples_unused"]) == (5.0, 5.0)
    metrics.lost(first)
    metrics.lost(second)
    none = metrics.snapshot([])
    assert (none["rollout/inflight_requests"], none["rollout/tokens_per_second"]) == (0.0, 0.0)
    assert none["rollout/workers_lost"] == 2.0
    gone = ("rollout/inflight_requests", "rollout/tokens_per_second", "rollout/workers_lost", "teachers/a/inflight")
    assert both["teachers/a/inflight"] == 2.0 and "teachers/a/inflight" not in none
    assert {k: v for k, v in both.items() if k not in gone} == {k: v for k, v in none.items() if k not in gone}
