"""The laws of a server's life, for every order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passing_time import Clock

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


def healthy(policy=POLICY):
    health = ServerHealth(policy, Clock())
    health.started()
    health.synced()
    return health


# Weighted so that long lives happen: an early retirement ends everything.
events = st.lists(st.sampled_from([*(name for name in EVENTS if name != "retire")] * 4 + ["retire"]), max_size=60)


@settings(max_examples=400)
@given(events)
def test_a_server_serves_only_if_a_sync_completed_after_its_last_start_and_none_failed_or_was_missed_since(names):
    health = ServerHealth(POLICY, Clock())
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
    health = ServerHealth(POLICY, Clock())
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


LIVES = [
    # Good probes do not save a wedged scheduler.
    ("started synced request_failed probe_ok probe_ok", ServerState.SUSPECT, "late", False),
    (
        "started synced request_failed probe_ok request_failed",
        ServerState.DEAD,
        "2 requests in a row failed: late",
        True,
    ),
    # A stale server dies of failed probes too; a sync does not hide that they fail.
    ("started probe_failed probe_failed", ServerState.STALE, "not synced since its start", False),
    ("started probe_failed probe_failed probe_failed", ServerState.DEAD, "3 probes in a row failed: late", False),
    (
        "started probe_failed synced",
        ServerState.SUSPECT,
        "it failed before its sync and has not recovered since",
        False,
    ),
    ("started probe_failed synced probe_ok", ServerState.HEALTHY, "", False),
    # A server that fails sync after sync is started again; a missed sync counts as no failure.
    ("started synced sync_failed", ServerState.STALE, "lost", False),
    ("started synced sync_failed synced sync_failed", ServerState.STALE, "lost", False),
    ("started synced sync_failed sync_failed", ServerState.DEAD, "2 syncs in a row failed: lost", False),
    ("started synced missed_sync", ServerState.STALE, "it was pinned", False),
    ("started synced" + 3 * " missed_sync synced", ServerState.HEALTHY, "", False),
    # Requests are to blame for a death only while they run and no weights arrive.
    ("started synced died", ServerState.DEAD, "gone", True),
    ("started synced sync_began died", ServerState.DEAD, "gone", False),
    ("started synced sync_began sync_ended died", ServerState.DEAD, "gone", True),
    ("started synced mark_dead died", ServerState.DEAD, "gone", False),
    ("started synced sync_failed died", ServerState.DEAD, "gone", False),
    ("started died", ServerState.DEAD, "gone", False),
    # A sync that a server died in is over with its next start.
    ("started synced sync_began died next_restart begin_restart started synced died", ServerState.DEAD, "gone", True),
    # News of a server that is gone changes nothing.
    *(
        (f"started synced died {late}", ServerState.DEAD, "gone", True)
        for late in ("started", "synced", "sync_failed", "probe_failed", "probe_ok")
    ),
]


@pytest.mark.parametrize(("names", "state", "reason", "suspected"), LIVES, ids=[life[0] for life in LIVES])
def test_a_life_ends_in_its_state_with_the_reason_and_the_suspects(names, state, reason, suspected):
    health = ServerHealth(POLICY, Clock())
    for name in names.split():
        EVENTS[name](health)
    assert (health.state, health.reason, health.requests_suspected) == (state, reason, suspected)


def restart(health, reason):
    """The server dies and starts again."""
    health.died(reason)
    assert health.next_restart() is not None
    health.begin_restart()
    health.started()


@given(limit=st.integers(0, 5), gaps=st.lists(st.floats(0.0, 60.0), max_size=40))
def test_no_window_holds_more_restarts_than_allowed_and_waits_grow_within_it(limit, gaps):
    clock = Clock()
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
    clock = Clock()
    restarts = RestartBudget(4, 100.0, clock)
    assert [restarts.take() for _ in range(5)] == [0.0, FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, None]
    clock.now = 105.0
    assert restarts.take() == 0.0


@pytest.mark.parametrize("when", ["before the restart", "once it is charged", "after the start"])
def test_a_refunded_death_takes_no_restart_from_the_budget(when):
    health = healthy()
    for _ in range(10 * POLICY.restarts):
        health.died("poison")
        if when == "before the restart":
            health.refund_restart()
        wait = health.next_restart()
        assert wait == 0.0 if when == "before the restart" else wait is not None
        if when == "once it is charged":
            health.refund_restart()
        health.begin_restart()
        health.started()
        if when == "after the start":
            health.refund_restart()
    for _ in range(POLICY.restarts):
        restart(health, "its own fault")
    health.died("its own fault")
    assert health.next_restart() is None


def test_each_death_that_one_prompt_explains_is_refunded():
    health = healthy()
    for _ in range(POLICY.restarts - 1):
        restart(health, "poison, not known yet")
    health.died("poison")
    # Convicted by this death: it and those before are excused at once, before the server starts again.
    for _ in range(POLICY.restarts):
        health.refund_restart()
    assert health.next_restart() == 0.0
    health.begin_restart()
    health.started()
    for _ in range(POLICY.restarts):
        restart(health, "its own fault")
