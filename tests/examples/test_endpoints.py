"""Which endpoint is asked next, and which one rests."""

import pytest
from deepresearch.endpoints import LONGEST_REST, Endpoints
from passing_time import Clock


@pytest.fixture
def clock():
    return Clock(100.0)


def names(endpoints):
    return [endpoint.url for endpoint in endpoints]


def test_a_failing_endpoint_backs_off_exponentially(clock):
    pool = Endpoints(["a", "b"], rest=5, clock=clock)
    a = pool.acquire()
    pool.release(a, ok=False)
    assert (a.failures, a.rests_until) == (1, 105.0)
    for _ in range(3):
        assert pool.acquire().url == "b"
    clock.now = 105.0
    assert pool.acquire() is a, "it is awake again and has nothing to do"
    pool.release(a, ok=False)
    assert a.rests_until == 115.0
    for _ in range(20):
        a.active += 1
        pool.release(a, ok=False)
    assert a.rests_until == clock.now + LONGEST_REST
    a.active += 1
    pool.release(a, ok=True)
    assert (a.failures, a.rests_until) == (0, 0.0)


def test_when_all_back_off_the_next_available_one_is_used(clock):
    pool = Endpoints(["a", "b"], rest=5, clock=clock)
    a, b = pool.acquire(), pool.acquire()
    pool.release(b, ok=False)
    clock.now += 1
    pool.release(a, ok=False)
    assert pool.acquire() is b


def test_other_endpoints_are_tried_before_the_same_one(clock):
    pool = Endpoints(["a", "b"], rest=5, clock=clock)
    a = pool.acquire()
    busy = pool.acquire()
    pool.release(a, ok=None)
    assert pool.untried([a])
    assert pool.acquire(tried=[a]) is busy, "though it is busier"
    assert pool.acquire(tried=[a, busy]) is a
    assert not pool.untried([a, busy])
