"""Ends what a process has started, also after that process was killed (Linux).

The kernel hands the children of a killed process to another parent, so parentage no longer leads to them. Two things
still do: an environment variable with a unique value, which every program inherits that does not start with an
environment of its own, and the process group, if the killed process led one. Together they find a program in a session
of its own as well as a plain fork. Only a fork that has left the group without starting a program escapes both.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# From <sys/prctl.h>: the signal that the calling process receives when its parent dies.
PR_SET_PDEATHSIG = 1
# Seconds between two looks for what is left.
_LOOK_SECONDS = 0.05


def kill_orphans(leader: int, variable: str, value: str, seconds: float) -> list[int]:
    """Kills all processes of this machine with this environment variable, and the group of `leader` if that is dead.

    Looks again until none is left, for at most `seconds`: a process may start another meanwhile. Returns the ids of
    those that remain.
    """
    deadline = time.monotonic() + seconds
    while left := list(_orphans(leader, f"{variable}={value}".encode())):
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() >= deadline:
            return left
        time.sleep(_LOOK_SECONDS)
    return []


def end_with_parent() -> None:
    """Makes this process end with its parent, which forked it or is `multiprocessing`'s, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        # It died before.
        os._exit(1)


def _orphans(leader: int, mark: bytes) -> Iterator[int]:
    # A process that lives under this id after the leader's death is another one, and so is its group.
    group = None if _lives(leader) else leader
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or (pid := int(entry.name)) == os.getpid():
            continue
        # It may end at any moment, or belong to another user.
        with suppress(OSError):
            if _lives(pid) and (os.getpgid(pid) == group or mark in (entry / "environ").read_bytes().split(b"\0")):
                yield pid


def _lives(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
