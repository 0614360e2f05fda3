"""A driver that is killed anywhere around a checkpoint in the background loses nothing and trains nothing twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from controller_rig import FakeSaved, FakeTrainer, Rig
from killed import cut_short
from local_buffer import kill

from megasync.base.files import atomic_write, durable_rename
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.control.progress import Progress
from megasync.control.restore import restore
from megasync.trainer import checkpoint

pytestmark = pytest.mark.processes

STEPS, EVERY = 6, 2
WEIGHTS = "weights.json"


class SavingTrainer(FakeTrainer):
    """Its checkpoints are folders, which its ranks complete while the next step is trained."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._looks = 0
        if (newest := checkpoint.latest(run_dir)) is not None:
            self.weights = json.loads((newest / WEIGHTS).read_text())

    async def begin_save(self, step: int, state: dict[str, Any]) -> None:
        await super().begin_save(step, state)
        self._looks = 0

    async def finish_save(self, wait: bool) -> FakeSaved | None:
        self._looks += 1
        if not wait and self._looks < 2:
            return None
        step, state, weights = self._saving
        path = checkpoint.step_path(self._run_dir, step)
        draft = checkpoint.partial_path(path)
        draft.mkdir(parents=True, exist_ok=True)
        for name, content in ((checkpoint.STATE, state), (WEIGHTS, weights), (checkpoint.MARKER, "")):
            atomic_write(draft / name, json.dumps(content))
        durable_rename(draft, path)
        checkpoint.prune(self._run_dir, 1)
        return FakeSaved(path, step)


class Source:
    """Prompts without end, of which those that were admitted before are left out."""

    def __init__(self) -> None:
        self.first = 0

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...
    def requeue(self, uids: list[str]) -> None: ...

    def skip(self, admitted: list[str]) -> None:
        self.first = len(admitted)


def driver(run_dir: Path) -> Rig:
    """The driver of a new run, or of one that goes on."""
    ledger, source = run_dir / LEDGER_FILE, Source()
    schedule = Rig(total_steps=STEPS).controller.config.schedule
    progress = restore(checkpoint.latest(run_dir), ledger, schedule, cast(Any, source), lambda text: None)
    return Rig(
        trainer=SavingTrainer(run_dir),
        ledger=ledger,
        progress=progress,
        rollout={"first": source.first},
        evaluate=False,
        checkpoint_every=EVERY,
        total_steps=STEPS,
    )


async def run(rig: Rig) -> Progress:
    await rig.buffer.publish(rig.controller.progress.version)
    return await rig.run()


SETUP = f"""
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1] / "support")!r}]
import asyncio
from test_checkpoint_kills import driver, run

def begin(folder): ...

def work(folder):
    asyncio.run(run(driver(folder)))
"""


@pytest.mark.parametrize(
    ("modules", "every"),
    [
        pytest.param(
            ("trainer/checkpoint.py", "test_checkpoint_kills.py", "megasync/base/files.py"), 29, id="the checkpoint"
        ),
        pytest.param(("control/controller.py", "buffer/async_buffer.py"), 101, id="the ledger"),
    ],
)
def test_every_group_is_trained_once_wherever_the_driver_was_killed(
    tmp_path: Path, modules: tuple[str, ...], every: int
) -> None:
    resumed_from = set()
    for case in cut_short(SETUP, tmp_path, modules, every=every):
        assert case.ended in ("killed", "done"), case.error
        newest = checkpoint.latest(case.folder)
        resumed_from.add(None if newest is None else checkpoint.step_of(newest))
        rig = driver(case.folder)
        progress = asyncio.run(run(rig))
        assert progress.step == STEPS
        groups = STEPS * rig.controller.config.schedule.groups_per_step
        assert len(rig.trainer.weights) == len(set(rig.trainer.weights)) == groups
        counts = rig.buffer._state.counts()
        assert counts["trained"] == groups
        assert counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["live"]
        kill(rig.buffer)
    assert resumed_from == {None, 2, 4, 6}
