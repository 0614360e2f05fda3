"""The simulator finds bugs: each of these is planted in the real code, and some schedule breaks the law that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from megasync.buffer.handle import AsyncBuffer
from megasync.buffer.state import TrajectoryBuffer
from megasync.controller import Controller
from megasync.progress import Progress
from megasync.recovery import Recovery
from megasync.rollout.health import ServerHealth, State
from megasync.sim import simulate
from megasync.sim.transport import SimPublisher
from megasync.watchdog import Watchdog

SEEDS = 300


def first_failure() -> BaseException:
    for seed in range(SEEDS):
        try:
            simulate(seed)
        except Exception as error:  # noqa: BLE001 - whatever a planted bug leads to
            assert any(f"seed {seed}" in note for note in error.__notes__), "a failing seed names itself"
            return error
    pytest.fail(f"none of {SEEDS} schedules found it")


def reused_version(self: Progress) -> int:
    self.claimed = self.version + 1
    return self.claimed


async def joins_without_weights(self: Recovery) -> None:
    await self._fleet.joined({server.url for server in self._fleet.joiners()})


async def no_rollback(self, step: int, version: int) -> None: ...


async def saves_too_early(self: Controller, groups: list) -> None:
    """The step counts as trained before it is."""
    self.progress.trained(self.progress.step + 1)
    await self._save()
    self.progress.step -= 1
    await TRAIN(self, groups)


TRAIN = Controller._train


def forgets_a_group(self: TrajectoryBuffer, version: int) -> None:
    """A publication frees the slot of a group that was not trained, which is then nowhere."""
    PUBLISH(self, version)
    for uid in self.live_uids()[:1]:
        self._book._leave(self._book.open[uid])


PUBLISH = TrajectoryBuffer.publish


async def counts_no_failure(self: AsyncBuffer, step: int, attempts: int, most_in_a_row: int) -> dict:
    return {"attempt": 1, "set_aside": [], "in_a_row": 0}


@contextmanager
def counts_recovery(self: Watchdog) -> Iterator[None]:
    """A step, a restart or a publish within its own deadline counts as silence."""
    yield


@pytest.mark.parametrize(
    ("owner", "name", "bug", "law"),
    [
        (Progress, "claim", reused_version, "names weights of"),
        (AsyncBuffer, "rollback", no_rollback, "asks for a batch"),
        (Recovery, "bring_joiners", joins_without_weights, "answers from version|names weights of"),
        (ServerHealth, "started", lambda self: self._become(State.HEALTHY), "answers from version|names weights of"),
        (SimPublisher, "forget_ranks", lambda self: None, "the transport knows the ranks"),
        (TrajectoryBuffer, "_check_age", lambda self, entry: True, "over the bound"),
        (TrajectoryBuffer, "publish", forgets_a_group, "admitted == trained"),
        (Watchdog, "bounded", counts_recovery, "no group was finished"),
        (AsyncBuffer, "step_failed", counts_no_failure, "is set aside after its attempts"),
        (AsyncBuffer, "_wake_next", lambda self: None, "no group was finished|is not over|could wake"),
        (Controller, "_train", saves_too_early, "does not fit the last trained step"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", None),
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, bug: Callable, law: str
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(Exception, match=law):
        raise first_failure()
