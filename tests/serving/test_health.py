"""The laws of a server's life, for every order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.schema import HealthConfig
from megasync.serving.health import ServerHealth, ServerState
from megasync.serving.restart_budget import FIRST_WAIT, LONGEST_WAIT, RestartBudget

POLICY = HealthConfig(probe_failures=3, request_failures=2, sync_failures=2, restarts=3, restart_window=100.0)
EVENTS = {
    "started": lambda h: h.started(),
    "synced": lambda h: h.synced(),
    "sync_failed": lambda h: h.sync_failed("lost"),
    "missed_sync": lambda h: h.missed_sync("it was pinned"),
    "probe_ok": lambda h: h.probe_ok(),
    "probe_failed": lambda h: h.probe_failed("late"),
    "request_ok": lambda h: h.request_ok(),
    "request_failed": lambda h: h.request_failed("late"),
    "sync_began": lambda h: h.sync_began(),
    "sync_ended": lambda h: h.sync_ended(),
    "died": lambda h: h.died("gone"),
    "mark_dead": lambda h: h.mark_dead("slow"),
    "refund_restart": lambda h: h.refund_restart(),
    "next_restart": lambda h: h.next_restart(),
    "begin_restart": lambda h: h.begin_restart(),
    "retire": lambda h: h.retire("scaled away"),
}


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def healthy(policy=POLICY):
    health = ServerHealth(policy, FakeClock())
    health.started()
    health.synced()
    return health


# Weighted so that long lives happen: an early retirement ends everything.
events = st.lists(st.sampled_from([*(name for name in EVENTS if name != "retire")] * 4 + ["retire"]), max_size=60)


@settings(max_examples=400)
@given(events)
def test_a_server_serves_only_if_a_sync_completed_after_its_last_start_and_none_failed_or_was_missed_since(names):
    health = ServerHealth(POLICY, FakeClock())
    entitled = False
    for name in names:
        before = health.state
        EVENTS[name](health)
        if name == "synced" and before.up:
            entitled = True
        if name in ("sync_failed", "missed_sync", "died", "mark_dead", "retire") or not health.up:
            entitled = False
        assert health.serves == entitled
        assert health.serves <= health.up


@settings(max_examples=400)
@given(events)
def test_retired_is_final_and_only_a_restart_leads_out_of_death(names):
    health = ServerHealth(POLICY, FakeClock())
    for name in names:
        before = health.state
        EVENTS[name](health)
        if before is ServerState.RETIRED:
            assert health.state is ServerState.RETIRED
        if before is ServerState.DEAD and health.state is not ServerState.DEAD:
            assert (name, health.state) in {
                ("begin_restart", ServerState.RESTARTING),
                ("next_restart", ServerState.RETIRED),
                ("retire", ServerState.RETIRED),
            }
        if health.state is ServerState.HEALTHY and before is not ServerState.HEALTHY:
            assert name in ("synced", "probe_ok", "request_ok")
        assert (health.state is ServerState.HEALTHY) <= (health.reason == "")


@given(st.lists(st.sampled_from(["probe_ok", "probe_failed", "request_ok", "request_failed"]), max_size=40))
def test_each_kind_of_failure_has_a_streak_of_its_own(names):
    health = healthy()
    streaks = {"probe": 0, "request": 0}
    for name in names:
        kind, outcome = name.split("_")
        EVENTS[name](health)
        streaks[kind] = streaks[kind] + 1 if outcome == "failed" else 0
        if streaks["probe"] >= 3 or streaks["request"] >= 2:
            assert health.state is ServerState.DEAD
            return
        assert health.state is (ServerState.SUSPECT if any(streaks.values()) else ServerState.HEALTHY)


def test_a_missed_sync_counts_as_no_failure():
    health = healthy()
    for _ in range(POLICY.sync_failures + 1):
        health.missed_sync("it was pinned")
        assert health.state is ServerState.STALE
        health.synced()
    assert health.state is ServerState.HEALTHY


def test_good_probes_do_not_save_a_wedged_scheduler():
    health = healthy()
    health.request_failed("late")
    for _ in range(10):
        health.probe_ok()
    assert health.state is ServerState.SUSPECT
    health.request_failed("late")
    assert health.state is ServerState.DEAD
    assert "2 requests in a row failed: late" in health.reason


def test_a_stale_server_dies_of_failed_probes_too():
    health = ServerHealth(POLICY, FakeClock())
    health.started()
    for _ in range(3):
        assert health.state is ServerState.STALE
        health.probe_failed("late")
    assert health.state is ServerState.DEAD


def test_a_server_that_fails_sync_after_sync_is_started_again():
    health = healthy()
    health.sync_failed("lost the link")
    assert (health.state, health.serves) == (ServerState.STALE, False)
    health.synced()
    health.sync_failed("lost the link")
    assert health.state is ServerState.STALE
    health.sync_failed("lost the link")
    assert health.state is ServerState.DEAD
    assert "2 syncs in a row failed: lost the link" in health.reason


def test_a_sync_does_not_hide_that_probes_fail():
    health = ServerHealth(POLICY, FakeClock())
    health.started()
    health.probe_failed("late")
    health.synced()
    assert (health.state, health.serves) == (ServerState.SUSPECT, True)
    health.probe_ok()
    assert health.state is ServerState.HEALTHY


def test_a_server_out_of_restarts_is_retired_with_its_last_reason():
    health = healthy()
    for _ in range(POLICY.restarts):
        health.died("killed")
        assert health.next_restart() is not None
        health.begin_restart()
        health.started()
    health.died("killed again")
    assert health.next_restart() is None
    assert health.state is ServerState.RETIRED
    assert health.reason == "3 restarts in 100 s were not enough; last failure: killed again"


@given(limit=st.integers(0, 5), gaps=st.lists(st.floats(0.0, 60.0), max_size=40))
def test_no_window_holds_more_restarts_than_allowed_and_waits_grow_within_it(limit, gaps):
    clock = FakeClock()
    restarts = RestartBudget(limit, 100.0, clock)
    begun = []
    for gap in gaps:
        clock.now += gap
        wait = restarts.take()
        if wait is None:
            assert len(begun) >= limit
            continue
        assert 0 <= wait <= LONGEST_WAIT
        clock.now += wait
        begun.append(clock.now)
        assert sum(when > clock.now - 100.0 for when in begun) <= limit


def test_waits_double_and_are_forgotten_after_the_window():
    clock = FakeClock()
    restarts = RestartBudget(4, 100.0, clock)
    assert [restarts.take() for _ in range(5)] == [0.0, FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, None]
    clock.now = 105.0
    assert restarts.take() == 0.0


@pytest.mark.parametrize("late", ["started", "synced", "sync_failed", "probe_failed", "probe_ok"])
def test_news_of_a_server_that_is_gone_changes_nothing(late):
    health = healthy()
    health.died("gone")
    EVENTS[late](health)
    assert (health.state, health.reason) == (ServerState.DEAD, "gone")


def test_requests_are_to_blame_for_a_death_only_while_they_run_and_no_weights_arrive():
    health = healthy()
    health.sync_began()
    health.died("gone")
    assert not health.requests_suspected
    health = healthy()
    health.sync_began()
    health.sync_ended()
    health.died("gone")
    assert health.requests_suspected
    for blameless in ("mark_dead", "sync_failed"):
        health = healthy()
        EVENTS[blameless](health)
        health.died("gone")
        assert not health.requests_suspected
    stale = ServerHealth(POLICY, FakeClock())
    stale.started()
    stale.died("gone")
    assert not stale.requests_suspected


def test_syncs_that_fail_a_server_to_death_are_not_the_requests_doing():
    health = healthy()
    health.sync_failed("lost")
    health.synced()
    health.sync_failed("lost")
    health.synced()
    health.sync_failed("lost")
    health.sync_failed("lost")
    assert (health.state, health.requests_suspected) == (ServerState.DEAD, False)


def test_a_sync_that_a_server_died_in_is_over_with_its_next_start():
    health = healthy()
    health.sync_began()
    health.died("gone")
    health.next_restart()
    health.begin_restart()
    health.started()
    health.synced()
    health.died("gone")
    assert health.requests_suspected


def test_a_refunded_death_takes_no_restart_from_the_budget():
    health = healthy()
    for _ in range(10 * POLICY.restarts):
        health.died("poison")
        health.refund_restart()
        assert health.next_restart() == 0.0
        health.begin_restart()
        health.started()
    for _ in range(10 * POLICY.restarts):
        health.died("poison")
        assert health.next_restart() is not None
        health.begin_restart()
        health.started()
        # Found out later.
        health.refund_restart()
    for _ in range(POLICY.restarts):
        health.died("its own fault")
        assert health.next_restart() is not None
        health.begin_restart()
        health.started()
    health.died("its own fault")
    assert health.next_restart() is None


def test_each_death_that_one_prompt_explains_is_refunded():
    health = healthy()
    for _ in range(POLICY.restarts - 1):
        health.died("poison, not known yet")
        assert health.next_restart() is not None
        health.begin_restart()
        health.started()
    health.died("poison")
    # Convicted by this death: it and those before are excused at once, before the server starts again.
    for _ in range(POLICY.restarts):
        health.refund_restart()
    assert health.next_restart() == 0.0
    health.begin_restart()
    health.started()
    for _ in range(POLICY.restarts):
        health.died("its own fault")
        assert health.next_restart() is not None
        health.begin_restart()
        health.started()


def test_a_charged_death_can_be_refunded_before_the_restart_begins():
    health = healthy()
    for _ in range(10 * POLICY.restarts):
        health.died("poison")
        assert health.next_restart() is not None
        health.refund_restart()
        health.begin_restart()
        health.started()
