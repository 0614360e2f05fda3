"""A step that raises an error on its groups: tried again, then they are set aside, over restarts of the run too."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from controller_rig import FakeTrainer, Rig
from local_buffer import kill

from megasync.buffer.beginning import begin_ledger, resume_ledger
from megasync.buffer.payload import in_memory
from megasync.control.progress import Progress
from megasync.control.recovery import write_failed_batch
from megasync.errors import NonFiniteError, TrainingError
from megasync.trajectory import Group, Trajectory

POISON = "0:3"


def trained(rig: Rig) -> list[str]:
    return [uid for _, _, uids in rig.trainer.steps for uid in uids]


async def test_a_batch_that_repeatedly_fails_its_step_is_dropped_and_the_run_continues(tmp_path: Path) -> None:
    rig = Rig(trainer=FakeTrainer(poison=[POISON]), checkpoint_every=1, failed_steps=tmp_path / "failed_steps")
    progress = await rig.run()
    assert progress.step == 6
    assert [step for step, _ in rig.trainer.failures] == [2, 2]
    assert POISON not in trained(rig)
    counts = await rig.buffer.counts()
    assert counts["trained"] == 12 and counts["dropped"] == {"failed_step": 2}, "its batch, of two groups"
    assert any("set aside: 0:2, 0:3" in message for message in rig.observer.messages)
    assert rig.observer.metrics[-1]["faults/steps_set_aside"] == 1.0
    (record,) = (tmp_path / "failed_steps").iterdir()
    told = json.loads(record.read_text())
    assert (told["step"], told["uids"]) == (2, ["0:2", "0:3"])
    assert "index is out of range" in told["error"]
    assert told["batch"][0]["trajectories"][0]["response_ids"] == [2]


async def test_a_transient_step_error_is_retried_without_dropping_a_group() -> None:
    rig = Rig(trainer=FakeTrainer(poison=[POISON], times=1), checkpoint_every=1)
    assert (await rig.run()).step == 6
    assert rig.trainer.restarts == 1, "what the ranks held after the error is of no use"
    assert POISON in trained(rig)
    assert (await rig.buffer.counts())["dropped"] == {}


async def test_a_step_error_that_recurs_with_other_groups_ends_the_run() -> None:
    """Such as out of memory whatever the batch: the data set is not used up for it."""
    rig = Rig(trainer=FakeTrainer(fail_at=3), checkpoint_every=1, max_restarts=10)
    with pytest.raises(
        TrainingError, match=r"rank 1 failed.*trainer\.step_attempts=2.*max_failed_steps=1.*not the cause"
    ):
        await rig.run()
    assert (await rig.buffer.counts())["dropped"] == {"failed_step": 2}


async def test_no_batch_is_dropped_if_max_failed_steps_is_zero() -> None:
    rig = Rig(trainer=FakeTrainer(fail_at=3), max_failed_steps=0)
    with pytest.raises(TrainingError, match=r"trainer\.max_failed_steps=0\): 0 forbids it"):
        await rig.run()
    assert (await rig.buffer.counts())["dropped"] == {}


async def test_a_non_finite_error_ends_the_run_without_retries() -> None:
    class Diverged(FakeTrainer):
        async def step(self, groups, step, version):
            raise NonFiniteError("4 optimizer steps in a row had a loss or gradient that is not finite")

    rig = Rig(trainer=Diverged())
    with pytest.raises(NonFiniteError):
        await rig.run()
    assert (rig.trainer.restarts, (await rig.buffer.counts())["dropped"]) == (0, {})


def resumed(rig: Rig, ledger: Path, trainer: FakeTrainer, **arguments: object) -> Rig:
    """The next driver of the same run, from its start: nothing was saved."""
    kill(rig.buffer)
    schedule = rig.controller.config.schedule
    resumed_ledger = resume_ledger(ledger, schedule, schedule.total_steps * schedule.groups_per_step, 0)
    return Rig(
        trainer=trainer,
        ledger=ledger,
        progress=Progress(version=resumed_ledger.version),
        evaluate=False,
        rollout={"first": len(resumed_ledger.admitted)},
        **arguments,
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    begin_ledger(path, 0, 0, {}, {})
    return path


@pytest.mark.parametrize(
    "failure",
    [{"poison": ["0:1"]}, {"lose": {"step 1": 100}}],
    ids=["raises an error", "loses a rank"],
)
async def test_step_attempts_are_counted_across_restarts_of_the_run(ledger: Path, failure: dict) -> None:
    """Without a restart of ranks in the run, each failure ends it; a scheduler starts it again."""
    rig = Rig(trainer=FakeTrainer(**failure), ledger=ledger, evaluate=False, max_restarts=0)
    for attempt in (1, 2):
        with pytest.raises(TrainingError, match=r"trainer\.max_restarts=0"):
            await rig.run()
        dropped = (await rig.buffer.counts())["dropped"]
        assert dropped == ({} if attempt == 1 else {"failed_step": 2})
        rig = resumed(rig, ledger, FakeTrainer(**failure if attempt == 1 else {}), max_restarts=0)
    assert (await rig.run()).step == 6
    assert not {"0:0", "0:1"} & set(trained(rig))


async def test_repeated_rank_losses_in_one_step_count_as_failures_of_that_step(ledger: Path) -> None:
    """A batch that crashes its ranks would use up every restart of every driver."""
    trainer = FakeTrainer(lose={"step 1": 6})
    rig = Rig(trainer=trainer, ledger=ledger, evaluate=False, max_restarts=2)
    with pytest.raises(TrainingError, match=r"2 times in a row without a new step \(trainer\.max_restarts=2"):
        await rig.run()
    rig = resumed(rig, ledger, trainer, max_restarts=2)
    assert (await rig.run()).step == 6
    assert (await rig.buffer.counts())["dropped"] == {"failed_step": 2}


async def test_restarts_of_a_persistently_failing_run_drop_no_further_groups(ledger: Path) -> None:
    rig = Rig(trainer=FakeTrainer(fail_at=1), ledger=ledger, evaluate=False, max_restarts=10)
    for _ in range(3):
        with pytest.raises(TrainingError, match="not the cause"):
            await rig.run()
        assert (await rig.buffer.counts())["dropped"] == {"failed_step": 2}
        rig = resumed(rig, ledger, FakeTrainer(fail_at=1), max_restarts=10)
    rig = resumed(rig, ledger, FakeTrainer())
    assert (await rig.run()).step == 6, "once the cause is mended"


def test_a_failed_batch_record_with_non_finite_numbers_is_valid_json(tmp_path: Path) -> None:
    answer = Trajectory([1], [2], [1], [-0.5], [0], reward=math.nan)
    write_failed_batch(tmp_path, 7, 3, [in_memory(Group("2:5", [answer]))], "bad")
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert path.name == "step-00000007-2-5.json" and '"NaN"' in text and "NaN," not in text


def test_an_unwritable_failed_batch_record_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_failed_batch(tmp_path / "file", 1, 0, [in_memory(Group("0:0", []))], "bad")
