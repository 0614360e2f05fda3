"""Evaluations of an exact version beside the training: what is pinned, what syncs leave out, and what has no score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from controller_rig import FakeFleet, Rig
from waits import until

from megasync.control import pinning
from megasync.errors import EvaluationAbandoned, SyncError


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "RETRY_SECONDS", 0.0)


class SlowEvaluation:
    """The evaluation beside the training that begins first lasts until `last`. `seen` has (step, version, servers)."""

    def __init__(self, last: Callable[[int, Any], Any]) -> None:
        self.seen: list[tuple[int, int, str | None]] = []
        self._last = last

    async def __call__(self, step: int, version: int, pinned: Any) -> None:
        assert pinned.version == version
        destination = await pinned.destination(0)
        self.seen.append((step, version, destination.server or destination.adapter))
        if len(self.seen) == 2:
            await self._last(version, pinned)


async def test_syncs_leave_out_a_pinned_server_which_then_gets_the_newest_version_and_serves() -> None:
    async def last(version: int, pinned: Any) -> None:
        assert rig.fleet.kept["b"][0] == version
        await until(lambda: rig.controller.progress.version >= version + 3)

    slow = SlowEvaluation(last)
    rig = Rig(exact=True, evaluation=slow, total_steps=10)
    progress = await rig.run()
    step, version, server = slow.seen[1]
    assert (step, server) == (2, "b") and version == 2
    assert slow.seen[0] == (0, 0, None) and slow.seen[-1] == (10, 10, None), "training waits for the first and the last"
    assert all(only == {"a"} for published, only in rig.publisher.only if version < published <= version + 3)
    assert not rig.fleet.kept and rig.fleet.up == {"a": True, "b": True}
    assert rig.fleet.synced[-1] == {"a", "b"}
    assert progress.version == 10 and (2, 0.1) in progress.history
    assert all(metrics["faults/abandoned_evaluations"] == 0.0 for metrics in rig.observer.metrics)


async def test_an_evaluation_moves_to_another_server_while_the_version_is_the_newest() -> None:
    fleet = FakeFleet()
    fleet.up["c"] = True

    async def last(version: int, pinned: Any) -> None:
        before = (await pinned.destination(0)).server
        if rig.controller.progress.claimed == version:
            fleet.die(before)
            moved.append((before, (await pinned.destination(0)).server))

    moved: list[tuple[str, str]] = []
    rig = Rig(exact=True, evaluation=SlowEvaluation(last), fleet=fleet, rollout={"stall_after": 4}, total_steps=6)
    running = asyncio.create_task(rig.run())
    await until(lambda: bool(moved) or running.done())
    rig.controller.request_stop("enough")
    await running
    ((before, after),) = moved
    assert before != after and fleet.pins == [(before, 2), (after, 2)]
    assert rig.observer.evaluations[1] == 2


async def test_without_another_holder_the_evaluation_has_no_score_and_the_next_due_one_runs() -> None:
    async def last(version: int, pinned: Any) -> None:
        await until(lambda: rig.controller.progress.version > version)
        rig.fleet.die((await pinned.destination(0)).server)
        rig.fleet.come("d")
        await pinned.destination(0)

    slow = SlowEvaluation(last)
    rig = Rig(exact=True, evaluation=slow, total_steps=12)
    progress = await rig.run()
    assert 2 not in rig.observer.evaluations and len(slow.seen) > 2
    assert [step for step, _ in progress.history] == rig.observer.evaluations
    assert rig.observer.metrics[-1]["faults/abandoned_evaluations"] == 1.0
    assert any(
        "evaluation abandoned" in message and "version 2 is lost" in message for message in rig.observer.messages
    )


async def test_training_waits_for_an_evaluation_where_no_server_can_be_spared() -> None:
    fleet = FakeFleet()
    del fleet.up["b"]

    async def evaluation(step: int, version: int, pinned: Any) -> None:
        trained = len(rig.trainer.steps)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(rig.trainer.steps) == trained and rig.controller.progress.version == version == step

    rig = Rig(exact=True, evaluation=evaluation, fleet=fleet)
    await rig.run()
    assert rig.observer.evaluations == [0, 2, 4, 6] and not fleet.pins


async def test_a_server_that_joins_a_wait_with_a_newer_version_costs_one_more_attempt() -> None:
    """Its weights are the trainer's, which were not published yet."""
    fleet = FakeFleet()
    del fleet.up["b"]
    attempts: list[int] = []

    async def evaluation(step: int, version: int, pinned: Any) -> None:
        attempts.append(version)
        if step == 2 and len(attempts) == 2:
            fleet.come("b")
            await until(lambda: rig.controller.progress.version > version)
            raise EvaluationAbandoned("an answer has another version")

    rig = Rig(exact=True, evaluation=evaluation, fleet=fleet, weight_sync_steps=4, total_steps=4)
    await rig.run()
    assert attempts[:3] == [0, 0, 1]
    assert rig.observer.evaluations == [0, 2, 4]
    assert rig.observer.metrics[-1]["faults/abandoned_evaluations"] == 1.0


async def test_nothing_is_pinned_while_some_server_may_hold_a_newer_version() -> None:
    """As after a publish that failed half-way."""
    rig = Rig(exact=True)
    progress = rig.controller.progress
    progress.next_version()
    over = False
    pin = rig.controller._pinning
    assert pin is not None

    async def attempt() -> Any:
        async with pin.beside_training(lambda: over) as pinned:
            return pinned

    waiting = asyncio.create_task(attempt())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done() and not rig.fleet.pins
    progress.published(progress.claimed)
    step, pinned = await waiting
    assert (step, pinned.version) == (0, 1) and rig.fleet.pins == [("b", 1)]
    assert not rig.fleet.kept, "it is released at the end of the context"
    progress.next_version()
    waiting = asyncio.create_task(attempt())
    await asyncio.sleep(0)
    over = True
    assert await waiting is None, "the run's last evaluation is for all servers"


class Adapters:
    def __init__(self) -> None:
        self.held: set[str] = set()
        self.names: list[str] = []
        self.broken = False

    async def hold(self, version: int) -> str | None:
        await asyncio.sleep(0)
        if self.broken:
            raise SyncError("out of memory")
        name = f"kept-{version}"
        self.held.add(name)
        self.names.append(name)
        return name

    def let_go(self, name: str) -> None:
        self.held.remove(name)


async def test_a_version_of_adapters_is_kept_by_name_and_every_server_serves_on() -> None:
    async def last(version: int, pinned: Any) -> None:
        assert adapters.held == {f"kept-{version}"}
        await until(lambda: rig.controller.progress.version >= version + 3)

    adapters = Adapters()
    slow = SlowEvaluation(last)
    rig = Rig(exact=True, evaluation=slow, held_adapters=adapters, total_steps=10)
    await rig.run()
    assert slow.seen[0] == (0, 0, None) and slow.seen[1] == (2, 2, "kept-2")
    assert not adapters.held and not rig.fleet.pins
    assert all(only is None for _, only in rig.publisher.only)


async def test_an_adapter_that_cannot_be_kept_is_reported_and_training_goes_on() -> None:
    adapters = Adapters()
    adapters.broken = True
    rig = Rig(exact=True, held_adapters=adapters, rollout={}, total_steps=4)
    progress = await rig.run()
    assert progress.step == 4 and rig.observer.evaluations == [0, 4]
    assert any("version 2 cannot be kept: out of memory" in message for message in rig.observer.messages)


async def test_version_zero_has_no_adapter_so_training_waits() -> None:
    adapters = Adapters()
    rig = Rig(exact=True, held_adapters=adapters, weight_sync_steps=4, total_steps=4)
    await rig.run()
    assert rig.observer.evaluations == [0, 2, 4] and not adapters.names
