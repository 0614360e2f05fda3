"""How a job on several machines ends before its run does: with fake machines, whose shell runs here what is for them."""

from __future__ import annotations

import asyncio
import errno
import io
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from megasync.config import load_config
from megasync.config.access import GENERATION_KEY_VARIABLE
from megasync.errors import MegasyncError
from megasync.launch import command
from megasync.launch.hosts import Host
from megasync.launch.launcher import STOPPED, Job, Launcher

PATIENCE = 60.0
# Stands for Python on a machine. The head is up at once, and so is the doctor done; the run ends when it is told to.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *" ray "*--head*) {other} ;;
  *" ray "*) echo 'megasync-node {{"head": "h:1", "address": "h", "interface": "lo"}}'; cat >/dev/null ;;
  *" doctor "*) {doctor} ;;
  *) while read -r line; do if [ "$line" = SIGINT ]; then exit 130; fi; done; exit 9 ;;
esac
"""
WAITS = 'while read -r line; do if [ "$line" = SIGINT ]; then exit 1; fi; done'


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


class FullDisk(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def job(config_file: Path, tmp_path: Path) -> Callable[..., Job]:
    shell = program(tmp_path / "at", '#!/usr/bin/env bash\nshift\nexec "$@"\n')

    def make(other: str = "cat >/dev/null", doctor: str = "exit 0") -> Job:
        python = program(tmp_path / "python", PYTHON.format(other=other, doctor=doctor))
        hosts = [Host("a"), Host("b")]
        return Job(hosts, load_config(config_file), config_file, [], tmp_path, shell=shell, python=python)

    return make


async def test_a_machine_that_cannot_execute_it_ends_the_job_at_once(job) -> None:
    said = []
    with pytest.raises(MegasyncError, match=r"b cannot execute .*/python; the checkout must lie at "):
        await asyncio.wait_for(Launcher(job(other="exit 127", doctor=WAITS), said.append).run(), PATIENCE)
    assert "starting the run" not in said


async def test_the_key_for_generation_goes_to_the_driver_and_through_its_pipe(job, monkeypatch) -> None:
    monkeypatch.setenv(GENERATION_KEY_VARIABLE, "a-key-of-the-users-own")
    said, tell = [], 'read -r line; echo "told $line $*"'
    launcher = Launcher(job(other=f"{tell}; cat >/dev/null", doctor=f"{tell}; exit 1"), said.append)
    with pytest.raises(MegasyncError, match="not ready"):
        await asyncio.wait_for(launcher.run(), PATIENCE)
    (told,) = [line for line in said if " doctor " in line and "told" in line]
    assert told.count("a-key-of-the-users-own") == 1
    assert not any("a-key-of-the-users-own" in line for line in said if line != told)


async def test_who_asks_for_the_end_while_the_run_is_being_started_is_heard(job) -> None:
    requests = []

    def say(line: str) -> None:
        if line == "starting the run":
            requests.append(asyncio.create_task(launcher.request_stop(signal.SIGINT)))

    launcher = Launcher(job(), say)
    assert await asyncio.wait_for(launcher.run(), PATIENCE) == STOPPED
    assert len(requests) == 1 and requests[0].exception() is None


async def test_who_asks_for_the_end_while_the_doctor_looks_gets_it(job) -> None:
    said = []
    launcher = Launcher(job(doctor=WAITS), said.append)
    running = asyncio.create_task(launcher.run())
    async with asyncio.timeout(PATIENCE):
        while launcher._driver is None:
            await asyncio.sleep(0.01)
        await launcher.request_stop(signal.SIGINT)
        assert await running == 1
    assert "starting the run" not in said


async def test_a_disk_that_is_full_of_output_costs_lines_and_not_the_run(job, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout", FullDisk())
    launcher = Launcher(job(other="for i in 1 2 3; do echo noise; done; cat >/dev/null"), command._say)
    running = asyncio.create_task(launcher.run())
    async with asyncio.timeout(PATIENCE):
        while not launcher._begun or launcher._driver is None:
            await asyncio.sleep(0.01)
        await launcher.request_stop(signal.SIGINT)
        assert await running == STOPPED
