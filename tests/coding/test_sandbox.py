"""A program in the sandbox cannot exceed its limits, and leaves nothing behind."""

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile

import psutil
import pytest
from processes import gone, lives
from sandboxes import of_sandboxes
from waits import until

from megasync.coding import sandbox
from megasync.coding.reward import CodeReward
from megasync.coding.sandbox import Check, run_check, run_program
from megasync.errors import SandboxError
from megasync.sandboxes import Limits, local
from megasync.sandboxes.local import Isolation, Keeper, sweep

pytestmark = pytest.mark.processes

LIMITS = Limits(cpu_seconds=1, wall_seconds=30, memory_mb=256, file_mb=1)


def started(source):
    return subprocess.Popen([sys.executable, "-c", source])


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder of sandboxes; afterwards it must be empty, and no process may have files open there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert gone(lambda: of_sandboxes(tmp_path))


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
async def test_a_program_that_exceeds_a_limit_is_stopped(program, what):
    outcome = await run_program(program, limits=LIMITS)
    if what == "cpu":
        assert outcome.code in (128 + 24, 128 + 9)  # SIGXCPU, or SIGKILL a second later
    else:
        assert outcome.code not in (0, None)
        assert what in outcome.stderr


async def test_a_program_past_its_deadline_is_killed_with_its_descendants():
    program = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, __file__])\ntime.sleep(600)"
    outcome = await run_program(
        program.replace("subprocess.Popen", "len(sys.argv) > 1 or subprocess.Popen").replace(
            "__file__]", "__file__, 'x']"
        ),
        limits=Limits(wall_seconds=1.0),
    )
    assert outcome.code is None


@pytest.mark.parametrize("kind", [local.isolation(), Isolation("", False)], ids=str)
@pytest.mark.parametrize(
    "start", [run_program, lambda source: run_check(source, Check("assert f"))], ids=["program", "check"]
)
async def test_a_cancelled_run_is_killed(monkeypatch, folder, start, kind):
    monkeypatch.setattr(sandbox, "isolation", lambda: kind)
    run = asyncio.create_task(start("import time; time.sleep(600)"))
    await until(
        lambda: any("program.py" in word or "link.py" in word for p in of_sandboxes(folder) for word in _words(p))
    )
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


def _words(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


async def test_cleanup_does_not_block_the_event_loop(monkeypatch, tmp_path_factory):
    """The removal waits for a file that this event loop writes while the removal runs."""
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation("", False))
    place = tmp_path_factory.mktemp("remover")
    begun, free, remover = place / "begun", place / "free", place / "rm"
    remover.write_text(
        f'#!/bin/sh\ntouch {begun}\nwhile [ ! -e {free} ]; do sleep 0.01; done\nexec {shutil.which("rm")} "$@"\n'
    )
    remover.chmod(0o755)
    monkeypatch.setenv("PATH", f"{remover.parent}:{os.environ['PATH']}")
    keeper = Keeper()
    monkeypatch.setattr(Keeper, "_shared", keeper)
    run = asyncio.create_task(run_program("", limits=Limits(wall_seconds=60)))
    async with asyncio.timeout(300):
        await until(begun.exists)
        assert not run.done()
        free.touch()
        await run
    keeper.close()


async def test_only_folders_of_dead_owners_are_removed(folder):
    dead = started("")
    dead.wait()
    alive, now = os.getpid(), local._started(os.getpid())
    here = local._place()
    kept = [f"megasync-sandbox-{here}-{alive}-{now}-a", "megasync-sandbox-x", f"megasync-sandbox-{here}-1-2"]
    # Of another machine or container that shares the folder: its process ids say nothing here.
    kept += ["other-1-2-x", f"megasync-sandbox-0123abcd-{dead.pid}-5-b", f"megasync-sandbox-{dead.pid}-5-b"]
    swept = [f"megasync-sandbox-{here}-{dead.pid}-5-b", f"megasync-sandbox-{here}-{alive}-{now - 1}-c"]
    for name in [*kept, *swept]:
        (folder / name / "work" / "deep").mkdir(parents=True)
    sweep()
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)
    for path in folder.iterdir():
        shutil.rmtree(path)


async def test_a_sandbox_that_cannot_be_set_up_is_an_error_and_not_a_failed_test(monkeypatch):
    order = sandbox.start_order
    monkeypatch.setattr(sandbox, "start_order", lambda *given: order(*given) | {"extra_bytes": "much"})
    for run in (run_program("print(1)"), run_check("f = 1", Check("assert f", ("f",)))):
        with pytest.raises(SandboxError, match=r"(?s)a sandbox could not be set up.*TypeError"):
            await run


@pytest.mark.parametrize("kind", [local.isolation(), Isolation("", False)], ids=str)
async def test_a_program_that_is_not_started_is_an_error_and_not_a_failed_test(monkeypatch, kind):
    monkeypatch.setattr(sandbox, "isolation", lambda: kind)
    monkeypatch.setattr(sandbox, "PYTHON", "/no/such/python")
    with pytest.raises(SandboxError, match=r"(?s)a sandbox could not be set up.*/no/such/python"):
        await run_program("")


async def test_a_program_that_kills_its_sandbox_has_failed(monkeypatch):
    """Otherwise it would be run again and again. With namespaces, no program can."""
    monkeypatch.setattr(sandbox, "isolation", lambda: Isolation("", False))
    assert (await run_program("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)")).code == 128 + 9


def test_limits_within_which_no_program_runs_are_refused():
    with pytest.raises(TypeError, match=r"(?s)no program can run within .*memory_mb=8.*raise the limits"):
        CodeReward(memory_mb=8)


async def test_a_limit_above_what_this_process_is_allowed_is_lowered():
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    program = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    outcome = await run_program(program, limits=Limits(open_files=allowed + 1))
    assert outcome.stdout == f"{allowed}\n"


@pytest.mark.parametrize("kind", [local.isolation(), Isolation("", False)], ids=str)
async def test_the_program_ends_when_its_owner_is_killed(kind, folder):
    """If the system kills the driver, no process enforces the deadline any more."""
    script = f"""
import asyncio, tempfile
from megasync.coding import sandbox
from megasync.sandboxes.local import Isolation
tempfile.tempdir = {str(folder)!r}
sandbox.isolation = lambda: {kind!r}
asyncio.run(sandbox.run_program("import os, time\\nif os.fork() == 0: os.setsid()\\ntime.sleep(600)"))
"""
    owner = started(script)
    pids = set()
    async with asyncio.timeout(300):
        while len([p for p in pids if lives(p)]) < 2:
            pids = {p.pid for p in of_sandboxes(folder) if any("program.py" in word for word in _words(p))}
            await asyncio.sleep(0.01)
    owner.kill()
    owner.wait()
    assert gone(lambda: list(pids))
    # By the keeper that its owner left.
    async with asyncio.timeout(300):
        await until(lambda: list(folder.iterdir()) == [])


async def test_a_program_sees_neither_this_environment_nor_installed_packages(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hush")
    outcome = await run_program("import os\nprint('SECRET_KEY' in os.environ, os.listdir('.'))\nimport numpy")
    assert outcome.stdout == "False []\n"
    assert "No module named 'numpy'" in outcome.stderr


@pytest.mark.skipif(not local.isolation().namespaces, reason="this kernel does not allow unprivileged namespaces")
async def test_a_program_has_no_network_and_processes_of_other_sessions_end_with_it():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        outcome = await run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)")
    assert "OSError" in outcome.stderr or "unreachable" in outcome.stderr
    outcome = await run_program(
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('left')"
    )
    assert (outcome.code, outcome.stdout) == (0, "left\n")
