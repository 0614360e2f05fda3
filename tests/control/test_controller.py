"""The controller's loops when nothing is lost: their order, their ends, and what is saved."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from controller_rig import FakeFrozenModels, FakePublisher, FakeTrainer, Rig

from megasync.control.progress import Progress
from megasync.errors import CheckpointError, DataError, MegasyncError, ServerError, TrainingError


async def test_it_trains_every_step_publishes_every_version_and_saves_at_the_end() -> None:
    rig = Rig()
    progress = await rig.run()
    assert (progress.step, progress.version) == (6, 6)
    assert [step for step, _, _ in rig.trainer.steps] == [1, 2, 3, 4, 5, 6]
    assert [version for _, version, _ in rig.trainer.steps] == [0, 1, 2, 3, 4, 5]
    assert rig.publisher.versions == [1, 2, 3, 4, 5, 6]
    uids = [uid for _, _, uids in rig.trainer.steps for uid in uids]
    assert len(uids) == len(set(uids)) == 12
    assert [state["step"] for state in rig.trainer.saved] == [6]
    assert rig.observer.evaluations[0] == 0
    assert rig.observer.evaluations[-1] == 6


async def test_weights_are_published_every_nth_step_and_after_the_last() -> None:
    rig = Rig(weight_sync_steps=4, max_staleness=0)
    progress = await rig.run()
    assert rig.publisher.versions == [1, 2]
    assert [version for _, version, _ in rig.trainer.steps] == [0, 0, 0, 0, 1, 1]
    assert progress.version == 2


async def test_generation_is_gated_during_a_sync_only_without_partial_rollout() -> None:
    partial, complete = Rig(total_steps=1), Rig(total_steps=1, partial_rollout=False)
    await partial.run()
    await complete.run()
    assert "closed" not in partial.rollouter.gates
    assert complete.rollouter.gates == ["closed", "open"]
    # A turn may consist of a generation and two calls to parsers, each with the deadline of a request.
    assert complete.rollouter.gate_timeout == 3 * complete.controller.config.timeouts.request


async def test_checkpoints_hold_what_a_resumed_run_needs() -> None:
    rig = Rig(checkpoint_every=2)
    await rig.run()
    assert [state["step"] for state in rig.trainer.saved] == [2, 4, 6]
    first = rig.trainer.saved[0]
    assert first["version"] == 2
    assert first["cursor"] == {"position": 7}
    trained = {uid for step, _, uids in rig.trainer.steps if step <= 2 for uid in uids}
    assert not trained & set(first["pending"])
    assert first["buffer"]["trained"] == 4
    assert Progress.from_state(first).step == 2


async def test_checkpoints_are_exported_beside_the_training_and_not_removed_meanwhile() -> None:
    events: list[str] = []

    async def export(path: Path) -> None:
        events.append(f"begin {path}")
        step = rig.trainer.steps[-1][0]
        while rig.trainer.steps[-1][0] == step and step < 6:
            assert len(rig.trainer.saved) == step // 2
            await asyncio.sleep(0)
        events.append(f"end {path}")
        if path.name == "step-4":
            raise CheckpointError("no space left on device")

    rig = Rig(checkpoint_every=2, export_every=2, export=export)
    assert (await rig.run()).step == 6
    assert events == [f"{what} step-{step}" for step in (2, 4, 6) for what in ("begin", "end")]
    assert "the run goes on without an export: no space left on device" in rig.observer.messages

    events.clear()
    rig = Rig(checkpoint_every=2, export_every=4, export=export)
    await rig.run()
    assert events == ["begin step-4", "end step-4"]


async def test_a_resumed_run_continues_the_step_count() -> None:
    rig = Rig(progress=Progress(step=4, version=0), total_steps=6)
    progress = await rig.run()
    assert [step for step, _, _ in rig.trainer.steps] == [5, 6]
    assert progress.step == 6


async def test_a_stop_request_finishes_the_step_and_saves() -> None:
    rig = Rig(total_steps=1000)
    running = asyncio.create_task(rig.run())
    while len(rig.trainer.steps) < 3:
        await asyncio.sleep(0)
    rig.controller.request_stop("Ctrl-C")
    progress = await running
    assert progress.step < 1000
    assert progress.step == rig.trainer.steps[-1][0] == rig.trainer.saved[-1]["step"]
    assert rig.controller.stop_reason == "Ctrl-C"


async def test_a_stop_request_ends_a_wait_for_groups_that_never_come() -> None:
    rig = Rig(rollout={"stall_after": 0})
    running = asyncio.create_task(rig.run())
    await rig.starved()
    rig.controller.request_stop("Ctrl-C")
    assert (await running).step == 0


@pytest.mark.parametrize("evaluated_step", [0, 2])
async def test_a_stop_request_waits_for_no_evaluation(evaluated_step: int) -> None:
    begun = asyncio.Event()

    async def evaluation(step: int, version: int, pinned: object) -> None:
        if step == evaluated_step:
            begun.set()
            await asyncio.Event().wait()

    rig = Rig(evaluation=evaluation, total_steps=2)
    running = asyncio.create_task(rig.run())
    await begun.wait()
    rig.controller.request_stop("SIGTERM")
    progress = await running
    assert progress.step == evaluated_step and rig.controller.stop_reason == "SIGTERM"
    assert evaluated_step not in rig.observer.evaluations


async def test_a_score_above_the_target_ends_the_run_and_is_measured_again() -> None:
    rig = Rig(total_steps=1000, score=0.95, stop_at_score=0.9)
    progress = await rig.run()
    assert progress.step < 1000
    assert rig.observer.evaluations[-1] == progress.step
    assert "0.95" in rig.controller.stop_reason


@pytest.mark.parametrize(
    ("rig_arguments", "words"),
    [
        ({"rollout": {"fail_after": 5}}, "reward function is wrong"),
        ({"publisher": FakePublisher(fail_at=3)}, "phase transfer, version 3"),
    ],
)
async def test_an_error_of_any_loop_ends_the_run_with_its_cause_and_the_work_saved(rig_arguments, words) -> None:
    rig = Rig(total_steps=1000, evaluate=False, **rig_arguments)
    with pytest.raises(MegasyncError, match=words):
        await rig.run()
    assert rig.buffer._state.closed is not None, "nobody may go on waiting"
    assert rig.trainer.saved[-1]["step"] == rig.trainer.steps[-1][0]


async def test_a_step_error_that_ends_the_run_saves_no_checkpoint() -> None:
    rig = Rig(trainer=FakeTrainer(fail_at=3), max_restarts=0)
    with pytest.raises(TrainingError, match="rank 1 failed"):
        await rig.run()
    assert (rig.trainer.saved, rig.trainer.restarts) == ([], 0)


async def test_a_fleet_that_is_lost_ends_the_run_and_the_trainer_saves() -> None:
    rig = Rig(total_steps=1_000_000, evaluate=False)
    running = asyncio.create_task(rig.run())
    while len(rig.trainer.steps) < 3:
        await asyncio.sleep(0)
    rig.fleet.dead.set()
    with pytest.raises(MegasyncError, match="no server is left"):
        await running
    assert rig.trainer.saved[-1]["step"] == rig.trainer.steps[-1][0]


async def test_a_lost_fleet_is_named_even_when_a_sync_noticed_it_first() -> None:
    class DeadServers(FakePublisher):
        async def publish(self, version, only=None):
            try:
                return await super().publish(version, only)
            finally:
                rig.fleet.dead.set()

    rig = Rig(publisher=DeadServers(fail_at=1), evaluate=False)
    with pytest.raises(MegasyncError, match="no server is left") as caught:
        await rig.run()
    assert "phase transfer" in str(caught.value.__cause__)


async def test_a_run_without_progress_ends_and_says_what_everyone_waits_for() -> None:
    now = 0.0
    rig = Rig(rollout={"stall_after": 0}, no_progress=100.0, clock=lambda: now)
    running = asyncio.create_task(rig.run())
    while "lease 1" not in await rig.buffer.waiting():
        await asyncio.sleep(0)
    while not running.done():
        now += 1.0
        await asyncio.sleep(0)
    with pytest.raises(TrainingError, match=r"no group was finished[\s\S]*lease 1[\s\S]*x training: .*_next_batch"):
        await running


async def test_waiting_for_requests_before_a_sync_is_no_stall() -> None:
    now = 0.0
    rig = Rig(rollout={"stall_after": 2}, partial_rollout=False, no_progress=100.0, clock=lambda: now)
    waiting, ended, looked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        looked.set()

    async def gate(timeout: float) -> None:
        if rig.trainer.steps:
            waiting.set()
            await ended.wait()

    rig.rollouter.gate, rig.fleet.watch = gate, watch
    running = asyncio.create_task(rig.run())
    await waiting.wait()
    # Each look of the watch loop begins with the fleet; the first may still see progress.
    for _ in range(4):
        looked.clear()
        now += 1000.0
        await asyncio.wait({running, asyncio.create_task(looked.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done()
    ended.set()
    rig.controller.request_stop("enough")
    await running


async def test_a_full_disk_at_the_end_is_an_error_and_does_not_hide_an_earlier_one() -> None:
    with pytest.raises(CheckpointError, match="no space left"):
        await Rig(trainer=FakeTrainer(disk_full=True)).run()
    with pytest.raises(DataError, match="reward function"):
        await Rig(trainer=FakeTrainer(disk_full=True), total_steps=1000, rollout={"fail_after": 9}).run()


async def test_a_failed_save_is_not_retried_at_the_end() -> None:
    rig = Rig(trainer=FakeTrainer(disk_full=True), checkpoint_every=2)
    with pytest.raises(CheckpointError, match="no space left"):
        await rig.run()
    assert (rig.trainer.save_calls, len(rig.trainer.steps)) == (1, 2)


async def test_a_permanently_lost_reward_model_ends_the_run_with_its_error() -> None:
    models = FakeFrozenModels()
    rig = Rig(frozen_models=models, rollout={"stall_after": 3})
    running = asyncio.create_task(rig.run())
    while not rig.observer.steps:
        await asyncio.sleep(0)
    assert rig.observer.metrics[0]["reward_models/grader/servers"] == 1.0
    models.dead = ServerError("reward model 'grader' has no server left")
    with pytest.raises(ServerError, match="'grader' has no server left"):
        await running
    assert [state["step"] for state in rig.trainer.saved] == [1]
