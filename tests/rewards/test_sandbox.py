"""A program in the sandbox cannot use up more than it is given, and leaves nothing behind."""

import asyncio
import tempfile

import pytest
from processes import gone, with_word

from megasync.rewards.sandbox import Limits, network_is_cut, run_program

LIMITS = Limits(cpu_seconds=1, wall_seconds=30, memory_mb=256, file_mb=1)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where sandboxes are made; afterwards it is empty, and no process works there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert gone(lambda: with_word(str(tmp_path)))


async def test_a_program_reads_its_input_and_its_output_comes_back():
    outcome = await run_program("import sys\nprint(input()[::-1])\nprint('!', file=sys.stderr)\nsys.exit(3)", "abc\n")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (3, "cba\n", "!\n")


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("while True: pass", "cpu"),
        ("bytearray(10**9)", "MemoryError"),
        ("open('x', 'wb').write(b'0' * 10**7)", "File too large"),
        ("while True: print('x' * 1000)", "File too large"),
        ("kept = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    ],
)
async def test_what_uses_up_more_than_it_has_is_stopped(program, what):
    outcome = await run_program(program, limits=LIMITS)
    if what == "cpu":
        assert outcome.code in (128 + 24, 128 + 9)  # SIGXCPU, or SIGKILL a second later
    else:
        assert outcome.code not in (0, None)
        assert what in outcome.stderr


async def test_past_its_deadline_the_program_is_killed_with_what_it_started():
    program = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, __file__])\ntime.sleep(600)"
    outcome = await run_program(
        program.replace("subprocess.Popen", "len(sys.argv) > 1 or subprocess.Popen").replace(
            "__file__]", "__file__, 'x']"
        ),
        limits=Limits(wall_seconds=1.0),
    )
    assert outcome.code is None


async def test_a_cancelled_run_is_killed_too(folder):
    run = asyncio.create_task(run_program("import time; time.sleep(600)"))
    async with asyncio.timeout(20):
        while not with_word(str(folder)):
            await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_it_sees_neither_this_environment_nor_installed_packages(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hush")
    outcome = await run_program("import os\nprint('SECRET_KEY' in os.environ, os.listdir('.'))\nimport numpy")
    assert outcome.stdout == "False []\n"
    assert "No module named 'numpy'" in outcome.stderr


@pytest.mark.skipif(not network_is_cut(), reason="this kernel lets no ordinary user make namespaces")
async def test_it_has_no_network_and_what_leaves_its_session_ends_with_it():
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        outcome = await run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)")
    assert "OSError" in outcome.stderr or "unreachable" in outcome.stderr
    outcome = await run_program(
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('left')"
    )
    assert (outcome.code, outcome.stdout) == (0, "left\n")
