"""`megasync stacks` names the run's report, or what a driver that does not answer is doing."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from megasync.app import mailbox
from megasync.app.mailbox import Mailbox, answer_with_report, report_of
from megasync.app.run_lock import RunLock
from megasync.config import CONFIG_FILE
from megasync.errors import ConfigError, MegasyncError
from megasync.observe.hang import HangReporter
from megasync.observe.state_file import RunState


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_FILE).write_text("")
    return tmp_path


async def test_a_run_answers_with_the_path_of_a_report(run_dir: Path) -> None:
    state = RunState(time=1.0)
    reports = HangReporter(run_dir, lambda: state, lambda _: None)
    with RunLock(run_dir):
        mailbox = Mailbox(run_dir)
        mailbox.open()
        async with mailbox.answering({"stacks": partial(answer_with_report, reports)}):
            answer = await asyncio.to_thread(report_of, run_dir)
    assert "requested by `megasync stacks`" in Path(answer).read_text()


async def test_a_report_that_cannot_be_written_is_refused_with_the_reason(run_dir: Path) -> None:
    (run_dir / "hang").write_text("in the way")
    state = RunState(time=1.0)
    with pytest.raises(MegasyncError, match="could not be written"):
        await answer_with_report(HangReporter(run_dir, lambda: state, lambda _: None))


def test_a_driver_that_does_not_answer_is_looked_at_from_outside(run_dir: Path, monkeypatch) -> None:
    monkeypatch.setattr(mailbox, "TOTAL_SECONDS", 0.0)
    with RunLock(run_dir):
        Mailbox(run_dir).open()
        answer = report_of(run_dir)
    assert "did not answer" in answer and f"driver (process {os.getpid()})" in answer


def test_a_run_that_is_not_live_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="not live"):
        report_of(run_dir)
