"""What the buffer does about a step that raised an error: counts it for its groups, and sets them aside in time."""

from __future__ import annotations

import pytest

from megasync.buffer import BufferStateError
from megasync.buffer.payload import encode
from megasync.buffer.state import FailedStep, TrajectoryBuffer
from megasync.config.pacing import Pacing
from megasync.trajectory import Group, Trajectory


def filled(groups: int = 4) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(Pacing(groups_per_step=2, max_staleness=3))
    for number in range(groups):
        finish(buffer, f"0:{number}")
    return buffer


def finish(buffer: TrajectoryBuffer, uid: str) -> None:
    answer = Trajectory([1], [2], loss_mask=[1], logprobs=[-0.5], versions=[0], reward=1.0)
    assert buffer.admit(uid)
    assert buffer.commit(encode(Group(uid, [answer, answer])))


def fail(buffer: TrajectoryBuffer, step: int, attempts: int = 2, most: int = 1) -> FailedStep:
    assert buffer.lease(step, buffer.version) is not None
    return buffer.step_failed(step, attempts, most)


def test_a_failed_batch_is_retried_until_its_attempts_are_exhausted() -> None:
    buffer = filled()
    assert fail(buffer, 1) == FailedStep(1, 1, [], 0)
    assert buffer.counts()["slots"]["finished"] == 4
    assert fail(buffer, 1) == FailedStep(1, 2, ["0:0", "0:1"], 1)
    assert buffer.counts()["dropped"] == {"failed_step": 2}
    assert [group.uid for group in buffer.lease(1, 0)] == ["0:2", "0:3"]


def test_only_the_group_that_exhausts_its_attempts_is_dropped() -> None:
    buffer = filled(2)
    fail(buffer, 1)
    buffer.drop("0:0", "workflow")
    finish(buffer, "0:2")
    assert fail(buffer, 1).set_aside == ["0:1"]
    assert buffer.live_uids() == ["0:2"]


def test_reporting_a_step_failure_twice_is_idempotent() -> None:
    buffer = filled()
    first = fail(buffer, 1)
    assert buffer.step_failed(1, 2, 1) == first
    assert fail(buffer, 1).attempt == 2


def test_consecutive_batch_drops_are_limited_until_the_failed_step_is_trained() -> None:
    buffer = filled(6)
    fail(buffer, 1, attempts=1)
    assert fail(buffer, 1, attempts=1) == FailedStep(1, 1, [], 1)
    assert buffer.counts()["dropped"] == {"failed_step": 2}
    buffer.lease(1, 0)
    buffer.ack(1)
    assert fail(buffer, 2, attempts=1).in_a_row == 1


def test_retraining_steps_after_a_rollback_does_not_reset_the_drop_limit() -> None:
    buffer = filled(8)
    buffer.lease(1, 0)
    buffer.ack(1)
    fail(buffer, 2, attempts=1)
    buffer.rollback(0, 0)
    for uid in ("0:0", "0:1"):
        assert buffer.reclaim() == uid
        answer = Trajectory([1], [2], loss_mask=[1], logprobs=[-0.5], versions=[0], reward=1.0)
        buffer.commit(encode(Group(uid, [answer, answer])))
    buffer.lease(1, 0)
    buffer.ack(1)
    assert fail(buffer, 2, attempts=1).set_aside == []


def test_step_failed_rejects_a_step_without_a_leased_batch() -> None:
    with pytest.raises(BufferStateError, match="step 1 cannot have failed: it has no batch"):
        filled().step_failed(1, 2, 1)


def test_failed_attempts_are_cleared_once_the_groups_are_trained() -> None:
    buffer = filled()
    fail(buffer, 1)
    buffer.lease(1, 0)
    buffer.ack(1)
    assert buffer.status.failed_attempts == {}
