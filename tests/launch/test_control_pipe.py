"""A command on a host ends when the launcher's connection closes, and receives the signals that the launcher sends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import lives
from waits import PATIENCE, until

from megasync.launch import remote as remote_shell
from megasync.launch.remote import Remote

pytestmark = pytest.mark.processes

# Prints its pid and parts of its environment, then every SIGINT that it receives; SIGTERM ends it.
COMMAND = """
import os, signal, sys, time
print(os.getpid(), os.environ["SECRET"], os.environ["MEGASYNC_HOST"], flush=True)
signal.signal(signal.SIGINT, lambda *_: print("SIGINT", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))
while True: time.sleep(0.05)
"""


class Lines(list):
    async def until(self, number: int) -> None:
        await until(lambda: len(self) >= number)


def node(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "megasync.launch.node", "--folder", str(folder), "--peer", "127.0.0.1", *words]


async def start(folder: Path, status: int = 0) -> tuple[Remote, Lines]:
    lines = Lines()
    command = [sys.executable, "-c", COMMAND.format(status=status)]
    remote = await Remote.start(
        "here", node(folder, "run", "--stop", "5", *command), {"SECRET": "sesame"}, lines.append
    )
    await lines.until(1)
    return remote, lines


async def test_secrets_come_through_the_pipe_and_signals_reach_the_command(tmp_path: Path) -> None:
    remote, lines = await start(tmp_path)
    pid, secret, host = lines[0].split()
    assert (secret, host) == ("sesame", "127.0.0.1")
    assert "sesame" not in Path(f"/proc/{pid}/cmdline").read_text()
    await remote.send(signal.SIGINT)
    await lines.until(2)
    assert lines[1] == "SIGINT"
    await remote.end(PATIENCE)
    assert not lives(int(pid))


async def test_the_end_of_the_pipe_ends_the_command_and_its_status_comes_back(tmp_path: Path) -> None:
    remote, lines = await start(tmp_path, status=7)
    remote._pipe.close()
    assert await asyncio.wait_for(remote.wait(), PATIENCE) == 7
    assert not lives(int(lines[0].split()[0]))


async def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    """The remote shell dies with its connection, which closes the pipe on the host."""
    launcher = f"""
import asyncio
from megasync.launch.remote import Remote
async def main():
    command = {node(tmp_path, "run", "--stop", "5", sys.executable, "-c", COMMAND.format(status=0))!r}
    remote = await Remote.start("here", command, {{"SECRET": "sesame"}}, lambda line: print(line, flush=True))
    await remote.wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", launcher, stdout=asyncio.subprocess.PIPE)
    pid = int((await asyncio.wait_for(process.stdout.readline(), PATIENCE)).split()[0])
    process.kill()
    await process.wait()
    await until(lambda: not lives(pid))


def test_a_silent_launcher_is_considered_lost() -> None:
    """A network cut does not close the pipe."""
    code = (
        "from megasync.launch.control_pipe import ControlPipe\n"
        "pipe = ControlPipe(silence=0.5)\npipe.watch()\npipe.ended.wait()\nprint('ended')"
    )
    machine = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    machine.stdin.write("{}\n\n")
    machine.stdin.flush()
    assert machine.wait(PATIENCE) == 0
    assert "ended" in machine.communicate()[0]


async def test_an_idle_launcher_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_shell, "HEARTBEAT_SECONDS", 0.05)
    lines = Lines()
    remote = await Remote.start(
        "here", [sys.executable, "-uc", "for line in open(0): print(repr(line))"], {}, lines.append
    )
    await lines.until(3)
    await remote.end(PATIENCE)
    assert lines[:3] == ["'{}\\n'", "'\\n'", "'\\n'"]


async def test_a_command_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    stubborn = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, flush=True)\ntime.sleep(600)"
    )
    lines = Lines()
    remote = await Remote.start(
        "here", node(tmp_path, "run", "--stop", "0.5", sys.executable, "-c", stubborn), {}, lines.append
    )
    await lines.until(1)
    await remote.end(PATIENCE)
    await until(lambda: not any(lives(int(pid)) for pid in lines[0].split()))


async def test_a_host_without_the_interface_reports_the_error(tmp_path: Path) -> None:
    lines = Lines()
    command = [sys.executable, "-m", "megasync.launch.node", "--folder", str(tmp_path), "--interface", "eth99"]
    remote = await Remote.start("here", [*command, "run", "true"], {}, lines.append)
    assert await asyncio.wait_for(remote.wait(), PATIENCE) == 2
    assert "has no interface 'eth99'" in lines[0]


async def test_a_shell_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-shell"):
        await Remote.start("here", ["no-such-shell"], {}, print)
