"""The controller's loops over the real buffer, with fakes for everything that does I/O."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megasync.buffer.handle import AsyncBuffer
from megasync.buffer.trajectory import Group, Trajectory
from megasync.config import Config
from megasync.controller import Controller, Progress
from megasync.errors import CheckpointError, DataError, MegasyncError, SyncError, TrainingError


class FakeRollouter:
    """Admits and commits groups as fast as the buffer lets it; `fail` raises after so many, `stall` never commits."""

    def __init__(self, buffer: AsyncBuffer, fail_after: int | None = None, stall: bool = False) -> None:
        self.finished_groups = 0
        self.gates: list[str] = []
        self._buffer = buffer
        self._fail_after = fail_after
        self._stall = stall
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        generating = asyncio.create_task(self._generate())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait({generating, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if generating in done:
                generating.result()
        finally:
            generating.cancel()
            stopped.cancel()
            await asyncio.gather(generating, stopped, return_exceptions=True)

    async def _generate(self) -> None:
        number = 0
        while True:
            uid = f"0:{number}"
            await self._buffer.admit(uid)
            number += 1
            if self._fail_after is not None and number > self._fail_after:
                raise DataError("the reward function is wrong")
            if not self._stall:
                answer = Trajectory([1], [2], [1], [-1.0], [self._buffer._state.version], reward=1.0)
                await self._buffer.commit(Group(uid, [answer, answer]))
                self.finished_groups += 1

    def stop(self) -> None:
        self._stopped.set()

    async def gate(self, timeout: float) -> None:
        self.gates.append("closed")

    def open(self) -> None:
        self.gates.append("open")

    def metrics(self) -> dict[str, float]:
        return {"rollout/inflight_groups": 0.0}


class FakeTrainer:
    def __init__(self, fail_at: int | None = None, disk_full: bool = False) -> None:
        self.steps: list[tuple[int, int, list[str]]] = []
        self.saved: list[dict] = []
        self.save_calls = 0
        self._fail_at = fail_at
        self._disk_full = disk_full

    async def step(self, groups: list[Group], step: int, version: int) -> dict[str, float]:
        await asyncio.sleep(0)
        if step == self._fail_at:
            raise TrainingError("rank 1 died")
        self.steps.append((step, version, [group.uid for group in groups]))
        return {"train/loss": 0.5}

    async def save(self, step: int, state: dict) -> Path:
        self.save_calls += 1
        if self._disk_full:
            raise CheckpointError("no space left on device")
        self.saved.append(state)
        return Path(f"step-{step}")


class FakePublisher:
    def __init__(self, fail_at: int | None = None) -> None:
        self.versions: list[int] = []
        self._fail_at = fail_at

    async def publish(self, version: int) -> dict[str, float]:
        if version == self._fail_at:
            raise SyncError(f"server 1, phase transfer, version {version}")
        self.versions.append(version)
        return {"sync/version": float(version)}


class FakeObserver:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[int] = []
        self.messages: list[str] = []

    def step(self, step: int, version: int, metrics: dict) -> None:
        self.steps.append(step)

    def evaluation(self, step: int, version: int, metrics: dict) -> None:
        self.evaluations.append(step)

    def activity(self, part: str, doing: str) -> None: ...
    def buffer(self, counts: dict) -> None: ...

    def message(self, text: str) -> None:
        self.messages.append(text)


class Rig:
    """A controller and the fakes around it; keyword arguments set the schedule."""

    def __init__(
        self,
        *,
        trainer: FakeTrainer | None = None,
        publisher: FakePublisher | None = None,
        score: float | None = None,
        evaluate: bool = True,
        checkpoint_every: int = 0,
        no_progress: float = 60.0,
        rollout: dict | None = None,
        progress: Progress | None = None,
        **schedule: object,
    ) -> None:
        config = Config()
        for key, value in ({"total_steps": 6, "groups_per_step": 2, "samples_per_group": 2} | schedule).items():
            setattr(config.schedule, key, value)
        config.eval.every_steps = 2
        config.checkpoint.every_steps = checkpoint_every
        config.timeouts.no_progress = no_progress
        total = config.schedule.total_steps * config.schedule.groups_per_step
        self.buffer = AsyncBuffer(config.schedule, total)
        self.rollouter = FakeRollouter(self.buffer, **(rollout or {}))
        self.trainer = trainer or FakeTrainer()
        self.publisher = publisher or FakePublisher()
        self.observer = FakeObserver()
        self.dead = asyncio.Event()

        async def held_out(step: int, version: int) -> dict[str, float]:
            await asyncio.sleep(0)
            return {"eval/score": score if score is not None and step >= 2 else 0.1}

        async def watch() -> None:
            if self.dead.is_set():
                raise MegasyncError("server 0 has died")

        self.controller = Controller(
            config,
            trainer=self.trainer,
            publisher=self.publisher,
            buffer=self.buffer,
            rollouter=self.rollouter,
            evaluate=held_out if evaluate else None,
            watch=watch,
            cursor=lambda: {"position": 7},
            observer=self.observer,
            progress=progress,
        )

    async def run(self) -> Progress:
        return await asyncio.wait_for(self.controller.run(), 20)


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
    partial, whole = Rig(total_steps=1), Rig(total_steps=1, partial_rollout=False)
    await partial.run()
    await whole.run()
    assert "closed" not in partial.rollouter.gates
    assert whole.rollouter.gates == ["closed", "open"]


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


async def test_a_resumed_run_counts_on() -> None:
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
    rig = Rig(rollout={"stall": True})
    running = asyncio.create_task(rig.run())
    await asyncio.sleep(0.05)
    rig.controller.request_stop("Ctrl-C")
    assert (await running).step == 0


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


async def test_a_failed_trainer_is_not_asked_to_save() -> None:
    rig = Rig(trainer=FakeTrainer(fail_at=3))
    with pytest.raises(TrainingError, match="rank 1 died"):
        await rig.run()
    assert rig.trainer.saved == []


async def test_a_dead_server_ends_the_run_and_the_trainer_saves() -> None:
    rig = Rig(total_steps=1_000_000, evaluate=False)
    running = asyncio.create_task(rig.run())
    while len(rig.trainer.steps) < 3:
        await asyncio.sleep(0)
    rig.dead.set()
    with pytest.raises(MegasyncError, match="server 0 has died"):
        await running
    assert rig.trainer.saved[-1]["step"] == rig.trainer.steps[-1][0]


async def test_a_dead_server_is_named_even_when_a_sync_noticed_it_first() -> None:
    rig = Rig(publisher=FakePublisher(fail_at=2), evaluate=False)
    rig.dead.set()
    with pytest.raises(MegasyncError, match="server 0 has died") as caught:
        await rig.run()
    assert "phase transfer" in str(caught.value.__cause__)


async def test_a_run_without_progress_ends_and_says_what_everyone_waits_for() -> None:
    rig = Rig(rollout={"stall": True}, no_progress=0.5)
    with pytest.raises(TrainingError, match="no group was finished.*lease 1"):
        await rig.run()


async def test_a_full_disk_at_the_end_is_an_error_and_does_not_hide_an_earlier_one() -> None:
    with pytest.raises(CheckpointError, match="no space left"):
        await Rig(trainer=FakeTrainer(disk_full=True)).run()
    with pytest.raises(DataError, match="reward function"):
        await Rig(trainer=FakeTrainer(disk_full=True), total_steps=1000, rollout={"fail_after": 9}).run()


async def test_a_save_that_failed_is_not_tried_again_at_the_end() -> None:
    rig = Rig(trainer=FakeTrainer(disk_full=True), checkpoint_every=2)
    with pytest.raises(CheckpointError, match="no space left"):
        await rig.run()
    assert (rig.trainer.save_calls, len(rig.trainer.steps)) == (1, 2)
