"""Stopping a job on several hosts, at every phase. The hosts are fake: their shell runs commands on this machine."""

from __future__ import annotations

import asyncio
import errno
import io
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from waits import PATIENCE, until

from megasync.config import load_config
from megasync.config.access import GENERATION_KEY_VARIABLE
from megasync.errors import MegasyncError
from megasync.launch.hosts import Host
from megasync.launch.launcher import STOPPED, Job, Launcher, _print_line

pytestmark = pytest.mark.processes

# Replaces Python on a host. Head and doctor succeed immediately; the run ends on SIGINT.
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


async def test_a_host_that_cannot_execute_the_command_ends_the_job_at_once(job) -> None:
    lines = []
    with pytest.raises(MegasyncError, match=r"b cannot execute .*/python; the checkout must be at "):
        await asyncio.wait_for(Launcher(job(other="exit 127", doctor=WAITS), lines.append).run(), PATIENCE)
    assert "starting the run" not in lines


async def test_the_generation_key_reaches_only_the_driver_and_only_through_its_pipe(job, monkeypatch) -> None:
    monkeypatch.setenv(GENERATION_KEY_VARIABLE, "a-key-of-the-users-own")
    lines, tell = [], 'read -r line; echo "received $line $*"'
    launcher = Launcher(job(other=f"{tell}; cat >/dev/null", doctor=f"{tell}; exit 1"), lines.append)
    with pytest.raises(MegasyncError, match="not ready"):
        await asyncio.wait_for(launcher.run(), PATIENCE)
    (doctor,) = [line for line in lines if " doctor " in line and "received" in line]
    assert doctor.count("a-key-of-the-users-own") == 1
    assert not any("a-key-of-the-users-own" in line for line in lines if line != doctor)


async def test_a_stop_requested_while_the_run_is_starting_is_honoured(job) -> None:
    requests = []

    def notify(line: str) -> None:
        if line == "starting the run":
            requests.append(asyncio.create_task(launcher.request_stop(signal.SIGINT)))

    launcher = Launcher(job(), notify)
    assert await asyncio.wait_for(launcher.run(), PATIENCE) == STOPPED
    assert len(requests) == 1 and requests[0].exception() is None


async def test_a_stop_requested_during_the_doctor_is_honoured(job) -> None:
    lines = []
    launcher = Launcher(job(doctor=WAITS), lines.append)
    running = asyncio.create_task(launcher.run())
    async with asyncio.timeout(PATIENCE):
        await until(lambda: launcher._driver is not None)
        await launcher.request_stop(signal.SIGINT)
        assert await running == 1
    assert "starting the run" not in lines


async def test_a_full_disk_loses_output_lines_but_not_the_run(job, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout", FullDisk())
    launcher = Launcher(job(other="for i in 1 2 3; do echo noise; done; cat >/dev/null"), _print_line)
    running = asyncio.create_task(launcher.run())
    async with asyncio.timeout(PATIENCE):
        await until(lambda: launcher._run_started and launcher._driver is not None)
        await launcher.request_stop(signal.SIGINT)
        assert await running == STOPPED
