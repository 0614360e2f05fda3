"""A checkpoint that cannot be written ends the run; the previous one stays, and the run resumes from it."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
from run_metrics import rows_of

from megasync.trainer import checkpoint

pytestmark = pytest.mark.real

# The weights of a rank of the miniature are smaller (0.2 MB), the state of its optimizer is larger (0.4 MB).
ROOM = 300_000
EVERY = 5


def test_a_full_disk_at_a_checkpoint_ends_the_run_which_can_be_resumed(miniature, launch, the_run_dir) -> None:
    schedule = {"total_steps": 100_000}
    checkpoints = {"every_steps": EVERY, "export": False}
    run = launch("train", miniature(schedule=schedule, checkpoint=checkpoints, rollout={"servers": 1}))
    run.wait_for("checkpoint: ")
    # Stands for a full disk, which needs a file system of its own: rank 1 may write no file beyond this size.
    (rank,) = [p for p in run.find("TrainerRank") if writes_to(p, the_run_dir() / "logs" / "trainer-1.log")]
    rank.rlimit(psutil.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))

    assert run.wait() == 2, run.output
    run_dir = the_run_dir()
    kept = checkpoint.complete(run_dir)
    failed = checkpoint.step_path(run_dir, step_of(kept[-1]) + EVERY)
    assert sorted((run_dir / "checkpoints").iterdir()) == kept, "nothing is left of the broken one"
    error = run.output.splitlines()[-1]
    assert error.startswith(f"CheckpointError: could not write checkpoint {failed}: rank 1: ")
    assert "File too large" in error
    assert f"megasync resume {run_dir}` continues from {kept[-1].name}" in error
    assert run.output.count("could not write checkpoint") == 1
    assert run.survivors() == []

    more = launch("resume", run_dir, f"schedule.total_steps={step_of(failed)}")
    assert more.wait() == 0, more.output
    assert checkpoint.latest(run_dir) == failed
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows if "time/step" in row] == list(range(1, step_of(failed) + 1))
    assert more.survivors() == []


def writes_to(process: psutil.Process, path: Path) -> bool:
    return str(path) in {file.path for file in process.open_files()}


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
