"""A run is stopped through its `--continue` file, and one that has stopped is told from one that has finished."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megasync.app.mailbox import Mailbox
from megasync.app.resume_file import write_resume_file
from megasync.app.run_lock import RunLock
from megasync.buffer.ledger import FILE as LEDGER_FILE
from megasync.errors import MegasyncError
from megasync.launch.preemption import UNFINISHED, main, stop_run
from megasync.observe.state_file import RunState, Status, write_state


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has begun."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("name: test\n")
    monkeypatch.setattr("megasync.app.resume_file.begun", lambda ledger: ledger == run_dir / LEDGER_FILE)
    return run_dir


@pytest.fixture
def run_file(run_dir: Path, tmp_path: Path) -> Path:
    write_resume_file(tmp_path / "this.run", run_dir)
    return tmp_path / "this.run"


async def test_a_live_run_is_asked_once_and_waited_for_until_it_has_saved(run_dir: Path, run_file: Path) -> None:
    asked = asyncio.Event()

    async def stop() -> str:
        asked.set()
        return "stopping"

    with RunLock(run_dir):
        mailbox = Mailbox(run_dir)
        mailbox.open()
        async with mailbox.answering({"stop": stop}):
            waiting = asyncio.create_task(asyncio.to_thread(stop_run, run_file, 60.0))
            await asked.wait()
            assert not waiting.done()
    assert await waiting == f"the run in {run_dir} has stopped"


async def test_a_run_that_is_starting_has_nothing_to_save(run_dir: Path, run_file: Path) -> None:
    async def refuse() -> str:
        raise MegasyncError("the run is still starting and has nothing to save")

    with RunLock(run_dir):
        mailbox = Mailbox(run_dir)
        mailbox.open()
        async with mailbox.answering({"stop": refuse}):
            with pytest.raises(MegasyncError, match="nothing to save"):
                await asyncio.to_thread(stop_run, run_file, 60.0)


def test_without_a_live_run_there_is_nothing_to_wait_for(run_file: Path, tmp_path: Path) -> None:
    for file in (run_file, tmp_path / "none.run"):
        assert main(["stop", str(file), "60"]) == 0
    (tmp_path / "empty.run").touch()
    assert main(["stop", str(tmp_path / "empty.run"), "60"]) == 1
    assert main(["wait"]) == 2


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", UNFINISHED), ("failed", UNFINISHED)])
def test_only_a_run_that_has_reached_its_goal_is_complete(
    status: Status, code: int, run_dir: Path, run_file: Path, tmp_path: Path
) -> None:
    write_state(run_dir, RunState(time=1.0, status=status))
    assert main(["check", str(run_file)]) == code
    assert main(["check", str(tmp_path / "none.run")]) == UNFINISHED
