"""Silence is time without a finished group or step, and without the time of work that has a deadline of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from controller_rig import FakeFleet, FakePublisher, FakeTrainer, Rig
from passing_time import Clock

from megasync.control.watchdog import Watchdog
from megasync.errors import TrainingError


def test_bounded_work_is_excluded_from_the_stall_time_and_is_not_progress() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    assert watchdog.stalled_seconds(0) == 0.0
    clock.now = 10.0
    with watchdog.bounded():
        clock.now = 1000.0
        assert watchdog.stalled_seconds(0) == 10.0
    clock.now = 1005.0
    assert watchdog.stalled_seconds(0) == 15.0, "the end of a restart is no finished group"
    assert watchdog.stalled_seconds(1) == 0.0


def test_overlapping_bounded_work_is_excluded_only_once() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.stalled_seconds(0)
    with watchdog.bounded():
        clock.now = 10.0
        with pytest.raises(ValueError, match="broken"), watchdog.bounded():
            clock.now = 20.0
            raise ValueError("broken")
        clock.now = 30.0
        assert watchdog.stalled_seconds(0) == 0.0
    clock.now = 31.0
    assert watchdog.stalled_seconds(0) == 1.0


def test_a_group_finished_during_bounded_work_resets_the_stall_time() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    watchdog.stalled_seconds(0)
    clock.now = 10.0
    with watchdog.bounded():
        clock.now = 20.0
        assert watchdog.stalled_seconds(1) == 0.0
    clock.now = 25.0
    assert watchdog.stalled_seconds(1) == 5.0


class WatchedFleet(FakeFleet):
    """Counts the looks of the watch loop, which come just before it asks for the silence."""

    looks = 0

    async def watch(self) -> None:
        self.looks += 1
        await super().watch()


def slow_once(call: Callable[..., Awaitable], clock: Clock, fleet: WatchedFleet) -> Callable[..., Awaitable]:
    """The call, whose first time takes a thousand seconds of the clock, between looks of the watch loop."""
    calls: list[tuple] = []

    async def looks(number: int) -> None:
        seen = fleet.looks
        while fleet.looks < seen + number:
            await asyncio.sleep(0)

    async def slow(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            # Until the rollout has filled the buffer, so that nothing more finishes during the call.
            await looks(10)
            clock.now += 1000.0
            await looks(3)
        return await call(*arguments)

    return slow


@pytest.mark.parametrize(
    "part_and_call",
    ["trainer.step", "trainer.begin_save", "trainer.finish_save", "trainer.restart", "publisher.publish"],
)
async def test_a_slow_step_save_restart_or_publish_is_not_a_stall(monkeypatch, part_and_call: str) -> None:
    monkeypatch.setattr("megasync.control.controller.WATCH_SECONDS", 0.001)
    clock, fleet = Clock(), WatchedFleet()
    rig = Rig(
        trainer=FakeTrainer(lose={"step 2": 1}),
        fleet=fleet,
        clock=clock,
        no_progress=100.0,
        checkpoint_every=1,
        total_steps=3,
    )
    part, call = part_and_call.split(".")
    target = getattr(rig, part)
    monkeypatch.setattr(target, call, slow_once(getattr(target, call), clock, fleet))
    assert (await rig.run()).step == 3
    assert clock.now == 1000.0


async def test_an_endless_wait_for_servers_is_a_stall(monkeypatch) -> None:
    """A sync without a server to go to has no deadline of its own."""
    rig = Rig(publisher=FakePublisher(lose={2: ["a", "b"]}), no_progress=0.2)
    rig.controller.config.timeouts.shutdown = 0.1
    with pytest.raises(TrainingError, match="no group was finished"):
        await rig.run()


async def test_a_stall_is_reported_before_the_run_ends(monkeypatch, tmp_path) -> None:
    reported: list[str] = []

    class Reports:
        async def report(self, reason, only=None):
            assert only is None and "timeouts.no_progress" in reason
            reported.append(reason)
            return tmp_path / "report.txt"

    rig = Rig(publisher=FakePublisher(lose={2: ["a", "b"]}), no_progress=0.2, reports=Reports())
    rig.controller.config.timeouts.shutdown = 0.1
    with pytest.raises(TrainingError, match=r"report\.txt"):
        await rig.run()
    assert len(reported) == 1
