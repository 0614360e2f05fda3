"""Requests to a live run; one that is not live is detected immediately."""

import asyncio
from contextlib import contextmanager
from pathlib import Path

import pytest
from waits import PATIENCE, until

from megasync.app.mailbox import Mailbox, ask
from megasync.app.run_lock import RunLock
from megasync.errors import ConfigError, MegasyncError, ServerError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("name: test\n")
    return tmp_path


@pytest.fixture
def running(run_dir):
    """Makes the mailbox of a live run, as a context."""

    @contextmanager
    def start():
        with RunLock(run_dir):
            mailbox = Mailbox(run_dir)
            mailbox.open()
            yield mailbox

    return start


async def asked(run_dir: Path, *request: object) -> str:
    return await asyncio.to_thread(ask, run_dir, *request, timeout=PATIENCE)


async def test_requests_are_answered_by_the_handler_of_their_name(run_dir, running):
    async def add(number, more):
        return f"{number + more} servers"

    async def refuse():
        raise ServerError("the cluster is full")

    with running() as mailbox:
        async with mailbox.answering({"add": add, "refuse": refuse}):
            answers = await asyncio.gather(asked(run_dir, "add", 1, 2), asked(run_dir, "add", 3, 4))
            assert answers == ["3 servers", "7 servers"]
            with pytest.raises(MegasyncError, match="the cluster is full"):
                await asked(run_dir, "refuse")
            with pytest.raises(MegasyncError, match="KeyError: 'unknown'"):
                await asked(run_dir, "unknown")
            assert await asked(run_dir, "add", 1, 1) == "2 servers"
    assert list((run_dir / "control").iterdir()) == []


def test_a_folder_without_a_run_and_a_run_that_has_ended_are_refused(tmp_path, run_dir, running):
    with pytest.raises(ConfigError, match="is not a run directory"):
        ask(tmp_path / "nowhere", "scale", 3, timeout=PATIENCE)
    with pytest.raises(ConfigError, match="is not live.*megasync resume"):
        ask(run_dir, "scale", 3, timeout=PATIENCE)
    with running():
        pass
    with pytest.raises(ConfigError, match="is not live"):
        ask(run_dir, "scale", 3, timeout=PATIENCE)


def test_waiting_for_an_answer_times_out(run_dir, running):
    with running(), pytest.raises(MegasyncError, match="did not answer within 0.5 s"):
        ask(run_dir, "scale", 3, timeout=0.5)


async def test_waiting_ends_when_the_run_ends(run_dir, running):
    with running():
        waiting = asyncio.create_task(asked(run_dir, "scale", 3))
        await until(lambda: list((run_dir / "control").glob("*.ask")))
    with pytest.raises(MegasyncError, match="ended before it answered"):
        await waiting


def test_only_requests_of_an_earlier_process_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    stem = "1764000000000000000-0123abcd"
    mine = [f"{stem}.ask", f"{stem}.answer", f".{stem}.ask.0123abcd.part"]
    foreign = ["notes.ask", f"{stem}.ask.bak", f"copy of {stem}.answer", ".x.part"]
    folder.mkdir()
    for name in (*mine, *foreign):
        (folder / name).mkdir(parents=True) if name == "notes.ask" else (folder / name).touch()
    Mailbox(tmp_path).open()
    assert sorted(path.name for path in folder.iterdir()) == sorted(foreign)
