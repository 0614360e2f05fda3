"""Virtual time: it jumps where nothing can run, and refuses to wait for nobody."""

from __future__ import annotations

import asyncio

import pytest

from megasync.lab.sim.clock import Deadlock, Livelock, VirtualLoop


def run(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def test_a_sleep_of_days_moves_the_clock_and_takes_no_time() -> None:
    async def sleeper() -> float:
        await asyncio.sleep(500_000.0)
        return asyncio.get_running_loop().time()

    assert run(sleeper()) == pytest.approx(500_000.0)


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def race() -> list[float]:
        order: list[float] = []

        async def late(seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(*(late(seconds) for seconds in (3.0, 1.0, 2.0)))
        return order

    assert run(race()) == [1.0, 2.0, 3.0]


def test_a_deadlock_is_reported_with_the_waiting_tasks() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="no timer is set and no task can run[\\s\\S]*forever > locks.py"):
        run(forever())


def test_a_livelock_is_detected() -> None:
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="spin"):
        run(spin())
