"""Managed processes end with their owner, whichever way it goes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import command_line, family, living
from waits import until, wait_until

from megasync.errors import ServerError
from megasync.serving.process import ManagedProcess

pytestmark = pytest.mark.processes

# A command with a child of its own; both pids are written to argv[1], and `argv[2] == stubborn` ignores SIGTERM. The
# child has much memory, so that it takes a while to go when it is killed.
FAMILY = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
fill = "import time; full = b'1' * 2**29; print('full', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", fill], stdout=subprocess.PIPE)
child.stdout.readline()
os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
with open(sys.argv[1] + ".part", "w") as out:
    out.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("up", flush=True)
time.sleep(600)
"""


def pids_of(tmp_path: Path) -> list[int]:
    wait_until((tmp_path / "pids").exists)
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def started(tmp_path: Path, temper: str = "mild") -> tuple[ManagedProcess, list[int]]:
    """A family that is up: what manages it, and the ids of the command and of its child."""
    command = [sys.executable, "-c", FAMILY, str(tmp_path / "pids"), temper]
    process = ManagedProcess(command, dict(os.environ), tmp_path / "log")
    process.start()
    return process, pids_of(tmp_path)


def gone(pids: list[int]) -> bool:
    return not living(pids)


@pytest.mark.parametrize("temper", ["mild", "stubborn"])
async def test_stop_ends_the_whole_family(tmp_path, temper):
    process, pids = started(tmp_path, temper)
    assert process.alive()
    await process.stop(timeout=0.5)
    assert not process.alive()
    assert gone(pids)
    await process.stop()


async def test_a_child_does_not_outlive_a_command_that_ends_by_itself(tmp_path):
    process, (command, child) = started(tmp_path)
    os.kill(command, signal.SIGKILL)
    assert await process.wait() == 128 + signal.SIGKILL
    assert gone([child])


APART = """
import os, subprocess, sys, time
# As agents are started, which may start others: each in a session of its own.
deeper = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True); " * int(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", deeper + "print(flush=True); import time; time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
pids = [os.getpid(), child.pid]
pids += map(int, open(f"/proc/{child.pid}/task/{child.pid}/children").read().split())
with open(sys.argv[1] + ".part", "w") as out:
    out.write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["killed", "stopped"])
async def test_what_has_a_session_of_its_own_ends_with_the_command(tmp_path, end):
    process = ManagedProcess(
        [sys.executable, "-c", APART, str(tmp_path / "pids"), "1"], dict(os.environ), tmp_path / "log"
    )
    process.start()
    pids = pids_of(tmp_path)
    assert len(pids) == 3
    if end == "killed":
        os.kill(pids[0], signal.SIGKILL)
        await process.wait()
    else:
        await process.stop()
    assert gone(pids)


OWNER = """
import os, sys, time
from pathlib import Path
from megasync.serving.process import ManagedProcess
command = [sys.executable, "-c", sys.argv[2], sys.argv[1], "mild"]
process = ManagedProcess(command, dict(os.environ), sys.argv[1] + ".log")
process.start()
time.sleep(600)
"""


def test_a_killed_owner_takes_the_family_along(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "pids"), FAMILY])
    pids = pids_of(tmp_path)
    owner.kill()
    owner.wait()
    wait_until(lambda: gone(pids))


def test_a_killed_supervisor_takes_the_command_along(tmp_path):
    process, (command, child) = started(tmp_path)
    try:
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: gone([command]))
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_family_survives_the_thread_that_started_it(tmp_path):
    with ThreadPoolExecutor(1) as thread:
        process, pids = thread.submit(started, tmp_path).result()
    # What the end of the thread would have killed is gone by the time that something else has been started and killed.
    other, others = started(tmp_path / "other")
    other.kill()
    wait_until(lambda: gone(others))
    assert process.alive()
    assert not gone(pids)
    process.kill()
    wait_until(lambda: gone(pids))


async def test_a_cancelled_stop_still_kills(tmp_path):
    process, pids = started(tmp_path, "stubborn")
    stopping = asyncio.create_task(process.stop(timeout=600))
    waiting = asyncio.create_task(process.wait())
    # The loop is free while both wait.
    await asyncio.sleep(0.1)
    assert not stopping.done() and not waiting.done()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await waiting
    assert gone(pids)


async def test_a_wait_ends_at_its_limit(tmp_path):
    process, _ = started(tmp_path)
    assert await process.wait(timeout=0.1) is None
    await process.stop(1.0)


async def test_the_tail_is_of_this_start_only(tmp_path):
    log = tmp_path / "log"
    log.write_text("an earlier run\n")
    process = ManagedProcess([sys.executable, "-c", "for i in range(50): print('line', i)"], dict(os.environ), log)
    process.start()
    assert await process.wait() == 0
    assert process.tail(2) == "line 48\nline 49"
    assert "earlier" not in process.tail(1000)
    assert log.read_text().startswith("an earlier run\nline 0")


async def test_a_command_that_does_not_exist_ends_with_its_name_in_the_log(tmp_path):
    process = ManagedProcess(["/no/such/program"], dict(os.environ), tmp_path / "log")
    process.start()
    assert await process.wait() == 127
    assert "/no/such/program" in process.tail()


async def test_scratch_is_removed_when_the_command_has_ended(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("")
    (tmp_path / "scratch-1").write_text("")
    (tmp_path / "kept").write_text("")
    process = ManagedProcess(
        ["true"], dict(os.environ), tmp_path / "log", [str(tmp_path / "folder"), str(tmp_path / "scratch-*")]
    )
    process.start()
    assert await process.wait() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "log"}


def test_a_log_that_cannot_be_written_is_a_server_error(tmp_path):
    (tmp_path / "file").write_text("")
    process = ManagedProcess(["true"], dict(os.environ), tmp_path / "file" / "log")
    with pytest.raises(ServerError, match="log"):
        process.start()


async def test_what_comes_through_the_pipe_is_on_no_command_line(tmp_path):
    """Through the supervisor, whole, and with an end; without it there is nothing to read."""
    read = [sys.executable, "-c", "import sys, time; print(repr(sys.stdin.read()), flush=True); time.sleep(60)"]
    for given, shown in ((b"a secret\n", "'a secret\\n'"), (None, "''")):
        process = ManagedProcess(read, dict(os.environ), tmp_path / f"{given}.log", stdin=given)
        process.start()
        try:
            await until(process.tail)
            assert process.tail() == shown
            lines = [command_line(member) for member in family(process.pid)]
            assert len(lines) >= 2 and not any("a secret" in line for line in lines)
        finally:
            await process.stop(1.0)
