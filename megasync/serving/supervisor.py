"""Runs one command, and kills its whole process group, and what else it started, when the owner or the command ends.

Run as a script, with the standard library only: ``python -S -E supervisor.py OWNER_PID SCRATCH COMMAND...``.
Invariant: no process of the command's group outlives this script or the owner, nor does a process in a session of its
own, which becomes this script's child when its parent ends; and afterwards nothing is left that
SCRATCH names (glob patterns, joined by `os.pathsep`). A pidfd of the owner wakes `_wait` as soon as the owner is gone,
even by SIGKILL. A parent-death signal covers the death of this script itself. The script has one thread, so that
signal cannot fire early, as it would in an owner whose forking thread ends.

SIGTERM is forwarded to the command alone, because a server that finds its own children killed takes that for a crash.
SIGUSR1 kills the whole group.
"""

from __future__ import annotations

import ctypes
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

# From <sys/prctl.h>: the signal that the calling process receives when its parent dies; whether it becomes the parent
# of orphaned descendants.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Seconds for killed processes to exit, which takes a while with much memory or inside a device driver.
GONE_SECONDS = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _forward(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if number == signal.SIGUSR1:
        _signal_group(child.pid, signal.SIGKILL)
    else:
        child.send_signal(number)


def _wait(owner: int, child: subprocess.Popen[bytes]) -> int:
    """The command's exit status. If the owner ends first, kills the group."""
    child_fd = os.pidfd_open(child.pid)
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        owner_fd = None
    # The pid may have been reused before pidfd_open. That it is our parent proves that it is the owner.
    if owner_fd is not None and os.getppid() == owner:
        poll = select.poll()
        poll.register(child_fd, select.POLLIN)
        poll.register(owner_fd, select.POLLIN)
        if any(fd == child_fd for fd, _ in poll.poll()):
            return child.wait()
    _signal_group(child.pid, signal.SIGKILL)
    return child.wait()


def _await_end(group: int) -> None:
    """Returns once no process of a killed group is left. As subreaper, this script is the parent of them all."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is None:
                time.sleep(0.01)
        except ChildProcessError:
            return


def _kill_children() -> None:
    """Kills what has left the group, until nothing is left: the children of what is killed become this script's."""
    deadline = time.monotonic() + GONE_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
                pass
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # A process may end at any moment. Its name, in parentheses, may hold anything.
            with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(entry))
    return found


def _remove(patterns: list[str]) -> None:
    for pattern in patterns:
        for path in glob.glob(pattern):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)


def main(owner: int, scratch: list[str], command: list[str]) -> int:
    # A signal that arrived before the command was started.
    early: signal.Signals | None = None
    child: subprocess.Popen[bytes] | None = None

    def on_signal(number: int, frame: object) -> None:
        nonlocal early
        early = signal.Signals(number)
        if child is not None:
            _forward(child, early)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR1, on_signal)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error}", file=sys.stderr)
        return 127
    if early is not None:
        _forward(child, early)
    try:
        return _wait(owner, child)
    finally:
        _signal_group(child.pid, signal.SIGKILL)
        _await_end(child.pid)
        _kill_children()
        _remove(scratch)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), list(filter(None, sys.argv[2].split(os.pathsep))), sys.argv[3:])
    sys.exit(128 - status if status < 0 else status)
