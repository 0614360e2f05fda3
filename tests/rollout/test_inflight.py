"""The cap follows the servers' KV caches, and never stops a run."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megasync.rollout.inflight import FIRST_REQUESTS, INCREASE, InflightCap, ServerLoad

ROOM = ServerLoad(token_usage=0.3, running=32, waiting=0)
FULL = ServerLoad(token_usage=0.95, running=32, waiting=0)

loads = st.builds(
    ServerLoad,
    token_usage=st.floats(0, 1),
    running=st.integers(0, 500),
    waiting=st.integers(0, 500),
    retracted=st.integers(0, 3),
)


@given(st.lists(st.tuples(st.lists(loads, max_size=5), st.integers(0, 5000)), max_size=50))
def test_the_cap_allows_at_least_one_request_per_server(steps):
    cap = InflightCap(servers=2, high_usage=0.9)
    for reports, inflight in steps:
        before = cap.limit
        assert cap.update(reports, inflight) == cap.limit >= max(1, len(reports))
        if not reports:
            assert cap.limit == before


def test_the_cap_doubles_until_the_first_pressure_and_then_grows_linearly():
    cap = InflightCap(servers=2, high_usage=0.9)
    assert cap.limit == 2 * FIRST_REQUESTS
    assert cap.update([ROOM, ROOM], 128) == 256
    assert cap.update([ROOM, FULL], 200) == 160
    assert cap.update([ROOM, ROOM], 160) == 160 + 2 * INCREASE


def test_the_cap_does_not_grow_while_it_is_not_the_bottleneck():
    cap = InflightCap(servers=1, high_usage=0.9)
    assert cap.update([ROOM], 10) == FIRST_REQUESTS


def test_sustained_pressure_lowers_the_cap_again_only_after_inflight_requests_reach_it():
    cap = InflightCap(servers=1, high_usage=0.9)
    # Long requests: 50 are still under way at each look.
    assert [cap.update([FULL], 50) for _ in range(4)] == [40, 40, 40, 40]
    assert cap.update([FULL], 40) == 32


def test_queues_and_retractions_count_as_pressure_bursts_do_not_and_a_pause_changes_nothing():
    def after(load):
        cap = InflightCap(servers=1, high_usage=0.9)
        return cap.update([load], FIRST_REQUESTS)

    assert after(ServerLoad(0.5, running=32, waiting=FIRST_REQUESTS + 1)) < FIRST_REQUESTS
    assert after(ServerLoad(0.5, running=32, waiting=0, retracted=1)) < FIRST_REQUESTS
    assert after(ServerLoad(0.5, running=32, waiting=FIRST_REQUESTS)) > FIRST_REQUESTS
    assert after(ServerLoad(0.5, running=0, waiting=64)) == FIRST_REQUESTS


def test_the_cap_scales_with_the_number_of_servers():
    cap = InflightCap(servers=2, high_usage=0.9)
    assert cap.update([ROOM] * 3, 10) == 3 * FIRST_REQUESTS
    assert cap.update([ROOM], 10) == FIRST_REQUESTS


def test_a_server_load_report_aggregates_its_ranks():
    rank = {"token_usage": 0.5, "num_running_reqs": 3, "num_waiting_reqs": 2}
    fuller = rank | {"token_usage": 0.75, "queues": {"retracted": 1}, "timestamp": 5.0, "decode_moments": [9.0, 40.0]}
    assert ServerLoad.parse({"loads": [rank, fuller]}) == ServerLoad(0.75, 6, 4, 1, decoded=40.0, time=5.0)


def test_throughput_is_that_between_two_reports():
    first = ServerLoad(0.1, 2, 0, decoded=100.0, time=10.0)
    assert first.after(None).throughput == 0.0
    second = replace(first, decoded=160.0, time=12.0).after(first)
    assert second.throughput == 30.0
    # The same report again, of a server at work and of one that has become idle.
    assert second.after(second).throughput == 30.0
    assert replace(second, running=0).after(second).throughput == 0.0
    assert replace(second, decoded=3.0, time=14.0).after(second).throughput == 0.0, "the counter began again"
