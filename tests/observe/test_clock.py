"""The offset of a clock comes from its fastest answer, and is exactly 0 on the same host."""

import asyncio
import time

from megasync.observe import clock
from megasync.observe.clock import Reading, clock_offset, clock_offsets, read_clock


def test_processes_of_one_host_have_no_offset():
    async def ask():
        return Reading(read_clock().host, 5.0)

    assert asyncio.run(clock_offset(ask)) == 0.0


def test_the_offset_is_that_of_the_fastest_round_trip(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(clock.time, "time", lambda: now[0])
    trips = iter([(3.0, 1.0), (0.1, 0.1), (0.5, 2.0), (9.0, 0.0), (1.0, 1.0)])

    async def ask():
        there, back = next(trips)
        now[0] += there
        reading = Reading("other", now[0] - 7.0)
        now[0] += back
        return reading

    assert abs(asyncio.run(clock_offset(ask)) - 7.0) < 1e-6


def test_one_process_of_each_other_host_is_asked():
    asked = []

    async def ask(number):
        asked.append(number)
        return Reading(readings[number].host, time.time() - 60.0)

    readings = [Reading(host, 0.0) for host in (read_clock().host, "a", "a", "b", read_clock().host)]
    offsets = asyncio.run(clock_offsets(readings, ask))
    assert sorted(offsets) == ["a", "b"]
    assert all(abs(offset - 60.0) < 30.0 for offset in offsets.values())
    assert set(asked) == {1, 3}
