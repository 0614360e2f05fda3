"""Gray failures: who is judged, against whom, and when nobody is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passing_time import Clock

from megasync.serving.outliers import BAD_CHECKS, SLOW_RESTARTS, SLOW_SECONDS, OutlierDetector


@dataclass
class Load:
    running: int
    throughput: float


def report(peers: OutlierDetector, clock: Clock, loads: dict[int, Load], seconds: float) -> dict[int, str]:
    """Every server reports every two seconds; the first verdict on each, after which it is as if it were new."""
    verdicts: dict[int, str] = {}
    until = clock.now + seconds
    while clock.now < until:
        clock.now += 2.0
        for slot, load in loads.items():
            if verdict := peers.reported(slot, load):
                verdicts.setdefault(slot, verdict)
                peers.left(slot)
    return verdicts


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(clock) -> OutlierDetector:
    return OutlierDetector(clock)


# Speed


def test_a_server_much_slower_than_its_peers_is_named_with_the_numbers(peers, clock):
    loads = {0: Load(10, 100.0), 1: Load(10, 120.0), 2: Load(10, 20.0)}
    verdicts = report(peers, clock, loads, SLOW_SECONDS + 10)
    assert list(verdicts) == [2]
    assert "2 tokens/s per request and 20 in total over 60 s" in verdicts[2]
    assert "0.25 (SLOW_SHARE) of the median of 2 peers, 11 and 110" in verdicts[2]


def test_no_server_is_judged_before_it_worked_long_enough(peers, clock):
    loads = {0: Load(10, 100.0), 1: Load(10, 1.0)}
    assert report(peers, clock, loads, 0.8 * SLOW_SECONDS) == {}


def test_a_break_begins_the_time_anew(peers, clock):
    for _ in range(5):
        report(peers, clock, {0: Load(10, 100.0), 1: Load(10, 1.0)}, 0.8 * SLOW_SECONDS)
        assert report(peers, clock, {0: Load(10, 100.0), 1: Load(0, 0.0)}, 2.0) == {}


@settings(deadline=None, max_examples=100)
@given(batches=st.lists(st.integers(1, 256), min_size=2, max_size=6), exponent=st.floats(0.0, 1.0))
def test_load_alone_is_no_fault(batches, exponent):
    """Equal servers: tokens per second grow at most in proportion to the batch, however unevenly it is spread."""
    clock = Clock()
    loads = {slot: Load(batch, 30.0 * batch**exponent) for slot, batch in enumerate(batches)}
    assert report(OutlierDetector(clock), clock, loads, 2 * SLOW_SECONDS) == {}


def test_when_all_are_slow_or_idle_nobody_is(peers, clock):
    assert report(peers, clock, {0: Load(10, 1.0), 1: Load(10, 1.1)}, 3 * SLOW_SECONDS) == {}
    assert report(peers, clock, {0: Load(10, 1.0), 1: Load(0, 0.0)}, 3 * SLOW_SECONDS) == {}
    assert report(peers, clock, {0: Load(10, 1.0)}, 3 * SLOW_SECONDS) == {}


def test_a_server_that_stays_slow_is_started_again_only_so_often(peers, clock):
    found = [
        report(peers, clock, {0: Load(10, 100.0), 1: Load(10, 1.0)}, 3 * SLOW_SECONDS / 2)
        for _ in range(SLOW_RESTARTS + 3)
    ]
    assert [len(verdicts) for verdicts in found] == [1] * SLOW_RESTARTS + [0] * 3


# Answers


def test_a_good_answer_ends_the_row(peers):
    peers.checked(0, None)
    for _ in range(10):
        assert peers.checked(1, "nan") is None
        assert peers.checked(1, None) is None


@pytest.mark.parametrize("others", [[0], [0, 2]])
def test_when_no_server_answers_well_one_of_them_is_restarted(peers, others):
    """What its next sync brings tells whether the weights are wrong; the others wait for what comes of it."""
    slots = [*others, 1]
    *early, verdict = [peers.checked(slot, "nan") for _ in range(BAD_CHECKS) for slot in slots]
    assert not any(early)
    assert f"and none of {len(others)} other servers passed theirs: this one gets the weights again" in verdict
    peers.left(1)
    assert [peers.checked(slot, "nan") for _ in range(5) for slot in others] == [None] * 5 * len(others)
    # It has come back, and passes: now the others have somebody to be compared with.
    peers.checked(1, None)
    assert all("1 of" in (peers.checked(slot, "nan") or "") for slot in others)


def test_a_server_that_still_fails_after_that_restart_is_restarted_until_it_is_given_up_then_another_one(peers):
    """So a run whose weights are wrong ends by its restart budgets, with the reason."""
    assert [peers.checked(slot, "nan") is not None for _ in range(BAD_CHECKS) for slot in (0, 1)][-1]
    for _ in range(3):
        peers.left(1)
        assert [peers.checked(1, "nan") is not None for _ in range(BAD_CHECKS)] == [False] * (BAD_CHECKS - 1) + [True]
        assert peers.checked(0, "nan") is None
    peers.retired(1)
    assert "none of 0 other servers" in peers.checked(0, "nan")


def test_a_server_without_peers_is_started_again_each_time(peers):
    """Until its restarts run out, with the reason; nothing is trained meanwhile."""
    for _ in range(3):
        assert peers.checked(1, "nan") is None
        assert "none of 0 other servers" in peers.checked(1, "nan")
        peers.left(1)


def test_a_peer_that_was_not_asked_yet_or_is_gone_proves_nothing(peers, clock):
    peers.reported(0, Load(1, 1.0))
    assert [peers.checked(1, "nan") for _ in range(5)] == [None] * 5
    peers.checked(0, None)
    peers.left(0)
    assert "none of 0 other servers" in peers.checked(1, "nan")


def test_a_peer_without_answers_to_its_checks_is_ignored(peers):
    for _ in range(BAD_CHECKS - 1):
        peers.unanswered(0)
    assert [peers.checked(1, "nan") for _ in range(5)] == [None] * 5
    peers.unanswered(0)
    assert "none of 1 other servers" in peers.checked(1, "nan")


def test_a_peer_that_passed_a_check_vouches_although_it_is_silent_now(peers):
    peers.checked(0, None)
    for _ in range(5):
        peers.unanswered(0)
    assert peers.checked(1, "nan") is None
    assert "1 of 1 other servers passed theirs" in peers.checked(1, "nan")
