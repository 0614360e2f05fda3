"""Nothing outlives a killed process that `kill_orphans` looks after, however it was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import gone, lives

from megasync.concurrency.orphans import kill_orphans

pytestmark = pytest.mark.processes

# Leads its own group, as Ray's workers do. Prints the ids of all that it starts.
OWNER = """
import multiprocessing, os, subprocess, sys, time
os.setpgid(0, 0)
os.environ["MARK"] = sys.argv[1]
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
started = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
forked.start()
nested = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(*started, forked.pid, nested.pid, int(nested.stdout.readline()), flush=True)
time.sleep(600)
"""
POOL = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from megasync.concurrency.orphans import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


def start(*command: str) -> tuple[subprocess.Popen[str], list[int]]:
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, [int(word) for word in owner.stdout.readline().split()]


def test_what_a_killed_process_has_started_ends_and_nothing_else() -> None:
    owner, pids = start(sys.executable, "-c", OWNER, "this-one")
    other, kept = start(sys.executable, "-c", OWNER, "this-one-too")
    assert len(pids) == len(kept) == 5
    try:
        owner.kill()
        owner.wait()
        assert all(map(lives, pids)), "by itself the kernel ends none of them"
        assert kill_orphans(owner.pid, "MARK", "this-one", 30.0) == []
        assert not any(map(lives, pids))
        assert all(map(lives, [other.pid, *kept]))
    finally:
        other.kill()
        other.wait()
        assert kill_orphans(other.pid, "MARK", "this-one-too", 30.0) == []


def test_the_group_of_a_process_that_lives_is_left_alone() -> None:
    owner, pids = start(sys.executable, "-c", OWNER, "first")
    try:
        assert kill_orphans(owner.pid, "MARK", "another", 0.0) == []
        assert all(map(lives, [owner.pid, *pids]))
    finally:
        owner.kill()
        owner.wait()
        kill_orphans(owner.pid, "MARK", "first", 30.0)


def test_a_process_of_a_pool_ends_with_its_killed_owner(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    owner, (pid,) = start(sys.executable, str(script))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert gone(lambda: [pid])
