"""A service that fails for everybody is paused, tried by one episode at a time, and left after a bound."""

from __future__ import annotations

import asyncio
import re

import pytest
from passing_time import Clock

from megasync.errors import DataError, ServerError, ServiceDown, ServiceFailed
from megasync.rollout import breaker as module
from megasync.rollout.breaker import Breaker, breaker_metrics, paused_services


class Rig:
    """A breaker whose pauses pass as soon as somebody waits for them."""

    def __init__(self, monkeypatch, patience=1e9):
        self.clock = Clock(100.0)
        self.breaker = Breaker("shop", clock=self.clock, delay_seconds=(5.0, 60.0), patience=patience)

        async def passes(event, seconds):
            # Either another episode changes something meanwhile, or time passes.
            for _ in range(5):
                await asyncio.sleep(0)
            if not event.is_set():
                self.clock.now += seconds
            return event.is_set()

        monkeypatch.setattr(module, "set_within", passes)

    async def episode(self, error=None, after=2.0):
        """An episode that ends so; failures are far enough apart to count."""
        async with self.breaker.episode():
            self.clock.now += after
            if error is not None:
                raise error


@pytest.fixture
def rig(monkeypatch):
    return Rig(monkeypatch)


def failed(service="shop"):
    return ServiceFailed("the server is gone", service)


async def fail(rig, times, **options):
    for _ in range(times):
        with pytest.raises(ServiceFailed):
            await rig.episode(failed(), **options)


async def test_three_failures_in_a_row_pause_it_and_a_success_of_the_trial_ends_the_pause(rig, caplog):
    await fail(rig, 2)
    await rig.episode()
    await fail(rig, 2)
    assert not rig.breaker.paused
    await fail(rig, 1)
    assert rig.breaker.paused and paused_services(breaker_metrics()) == ["shop"]
    assert "Paused shop after 3 failures in a row" in caplog.text and "the server is gone" in caplog.text
    before = rig.clock.now
    await rig.episode()
    assert rig.clock.now - before >= 3.0 and not rig.breaker.paused
    assert "shop" not in paused_services(breaker_metrics())


async def test_the_failures_of_one_crash_are_one_failure(rig):
    await fail(rig, 500, after=0.001)
    assert not rig.breaker.paused


@pytest.mark.parametrize(
    "error",
    [ServerError("a server of the fleet"), DataError("an invalid action"), failed("another"), asyncio.CancelledError()],
)
async def test_what_is_not_its_failure_does_not_count(rig, error):
    for _ in range(10):
        with pytest.raises(type(error)):
            await rig.episode(error)
    assert not rig.breaker.paused


async def test_its_failure_counts_also_as_a_cause(rig):
    for _ in range(3):
        with pytest.raises(DataError):
            async with rig.breaker.episode():
                rig.clock.now += 2
                try:
                    raise failed()
                except ServiceFailed as error:
                    raise DataError("a workflow's own error") from error
    assert rig.breaker.paused


async def test_one_episode_at_a_time_tries_a_paused_service_with_growing_delays(rig, caplog):
    await fail(rig, 3)
    running = most = tried = 0

    async def tries():
        nonlocal running, most, tried
        async with rig.breaker.episode():
            running += 1
            most, tried = max(most, running), tried + 1
            for _ in range(3):
                await asyncio.sleep(0)
            running -= 1
            if tried < 4:
                raise failed()

    results = await asyncio.gather(*(tries() for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(result, ServiceFailed) for result in results) == 3
    # The fourth trial succeeds, and those that waited begin at once.
    assert tried == 20 and not rig.breaker.paused
    assert most == 19 - 3
    delays = [int(seconds) for seconds in re.findall(r"next trial is in (\d+) s", caplog.text)]
    assert len(delays) == 3 and delays == sorted(set(delays))


async def test_a_trial_that_is_cancelled_leaves_the_trial_to_another(rig):
    await fail(rig, 3)
    began = asyncio.Event()

    async def hangs():
        async with rig.breaker.episode():
            began.set()
            await asyncio.Event().wait()

    hanging = asyncio.create_task(hangs())
    await began.wait()
    waiting = asyncio.create_task(rig.episode())
    await asyncio.sleep(0)
    hanging.cancel()
    await waiting
    assert not rig.breaker.paused


async def test_after_the_bound_an_episode_waits_for_one_more_trial_and_leaves(monkeypatch):
    rig = Rig(monkeypatch, patience=300.0)
    await fail(rig, 3)
    trials = 0

    async def sample():
        """A sample that is repeated for as long as it may."""
        nonlocal trials
        while True:
            try:
                async with rig.breaker.episode():
                    trials += 1
                    rig.clock.now += 1
                    raise failed()
            except ServiceFailed:
                continue

    results = await asyncio.gather(*(sample() for _ in range(5)), return_exceptions=True)
    assert {type(result) for result in results} == {ServiceDown}
    assert "shop has failed for everybody for" in str(results[0]) and "the server is gone" in str(results[0])
    assert trials < 20
    # Whoever comes later still tries once: the service may be back.
    with pytest.raises(ServiceDown):
        await sample()
    await rig.episode()
    assert not rig.breaker.paused
