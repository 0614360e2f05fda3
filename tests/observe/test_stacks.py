"""The stacks of a process name the function that it is in, however it is stuck, and show no secret."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from megasync.observe import stacks
from megasync.observe.stacks import Frame, ProcessStacks, Thread, place_of, stacks_of, stacks_of_family

STUCK = {
    "busy": "def spin():\n    print('ready', flush=True)\n    while True:\n        pass\nspin()",
    "blocked": (
        "import re\ndef match():\n    print('ready', flush=True)\n    re.match('(a+)+$', 'a' * 64 + 'b')\nmatch()"
    ),
    "awaits": (
        "import asyncio\nasync def rollout():\n    print('ready', flush=True)\n    await asyncio.Event().wait()\n"
        "async def main():\n    stacks.answer(asyncio.get_running_loop())\n"
        "    await asyncio.create_task(rollout(), name='sample 3')\nasyncio.run(main())"
    ),
    "family": (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time\\ndef idle(): time.sleep(600)\\nidle()'])\n"
        "print('ready', flush=True)\nchild.wait()"
    ),
}
SECRET = "hush-0123456789"


@pytest.fixture
def stuck() -> Iterator[Callable[[str], int]]:
    """Starts a process that is stuck in one of these ways; returns its id."""
    started: list[subprocess.Popen[bytes]] = []

    def start(how: str) -> int:
        code = f"from megasync.observe import stacks\nstacks.answer()\n{STUCK[how]}".replace(
            "stacks.answer()\nimport asyncio", "import asyncio"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, SECRET], stdout=subprocess.PIPE, env=os.environ | {"API_KEY": SECRET}
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process.pid

    yield start
    for process in started:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.communicate()


def look(pid: int) -> ProcessStacks:
    return stacks_of("worker-0", pid, time.monotonic() + 60)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def spy_may_read(pid: int) -> bool:
    return bool(stacks._spy(pid, 30)[0])


@pytest.fixture
def without_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)


@pytest.mark.processes
def test_py_spy_names_a_busy_function_and_a_stopped_one(stuck) -> None:
    pid = stuck("busy")
    if not spy_may_read(pid):
        pytest.skip("py-spy may not read other processes here")
    assert "spin (<string>:" in look(pid).text
    stop(pid)
    found = look(pid)
    assert found.state == "stopped" and "spin (<string>:" in found.place


@pytest.mark.processes
def test_without_py_spy_a_process_tells_its_own_stacks(stuck, without_spy) -> None:
    found = look(stuck("busy"))
    assert "spin (<string>:" in found.text and "py-spy is not installed" in found.text


@pytest.mark.processes
def test_without_py_spy_a_blocked_interpreter_is_named_by_its_signal_handler(stuck, without_spy) -> None:
    pid = stuck("blocked")
    # It is ready a moment before its interpreter is blocked, and answers until then.
    while stacks._ask(pid) is not None:
        pass
    assert "in match" in look(pid).text


@pytest.mark.processes
def test_without_py_spy_a_stopped_process_is_said_to_be_stopped(stuck, without_spy) -> None:
    pid = stuck("busy")
    stop(pid)
    found = look(pid)
    assert found.state == "stopped" and "py-spy is not installed" in found.place


@pytest.mark.processes
def test_a_process_tells_what_its_tasks_await(stuck) -> None:
    text = look(stuck("awaits")).text
    assert "sample: " in text and "rollout" in text and "locks.py" in text


@pytest.mark.processes
def test_what_a_process_has_started_is_shown_under_its_name(stuck) -> None:
    pid = stuck("family")
    found = stacks_of_family("worker-0", pid, time.monotonic() + 60)
    assert [each.name for each in found] == ["worker-0", "worker-0"] and found[0].pid == pid


@pytest.mark.processes
def test_no_secret_of_a_process_is_shown(stuck) -> None:
    assert SECRET not in repr(look(stuck("awaits"))) + repr(look(stuck("family")))


def test_a_process_that_has_ended_is_said_to_be_gone() -> None:
    assert look(2**22 - 1).state == "gone"


def test_without_time_left_nothing_is_read() -> None:
    assert stacks_of("me", os.getpid(), time.monotonic() - 1).place == "not read in time"


def frames(*places: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(function, file, 7) for function, file in places)


TORCH, RANK = "/x/site-packages/torch/distributed/", ("step", "/home/me/megasync/trainer/rank.py")
COLLECTIVE = frames(
    ("_wait", f"{TORCH}distributed_c10d.py"),
    ("all_reduce", f"{TORCH}distributed_c10d.py"),
    ("wrapper", f"{TORCH}c10d_logger.py"),
    ("reduce", "/x/site-packages/megatron/core/mappings.py"),
    RANK,
    ("main", "/x/ray/worker.py"),
)
IDLE = Thread("MainThread", frames(("main_loop", "/x/site-packages/ray/_private/worker.py")))
LOOP = Thread("AsyncIO Thread", frames(("rollout", "/home/me/mine.py"), ("_run_once", "/x/asyncio/base_events.py")))


@pytest.mark.parametrize(
    ("threads", "place"),
    [
        ([], ""),
        (
            [Thread("gRPC", ()), Thread("MainThread", COLLECTIVE)],
            "step(): in the collective all_reduce, called by reduce (megatron/core/mappings.py:7)",
        ),
        (
            [Thread("MainThread", frames(("advantage", "/home/me/mine.py"), RANK))],
            "step(): advantage (/home/me/mine.py:7), in no collective",
        ),
        # Of other processes, the innermost frame of the main thread, unless it waits for work and another one does not.
        (
            [Thread("pool", frames(("idle", "a.py"))), Thread("MainThread, holds it", frames(("f", "b.py")))],
            "f (b.py:7)",
        ),
        ([IDLE], "idle, main_loop (ray/_private/worker.py:7)"),
        ([IDLE, LOOP], "rollout (/home/me/mine.py:7)"),
    ],
)
def test_a_process_is_placed_where_it_is_busy(threads, place) -> None:
    assert place_of(threads) == place
