"""The state of the disk after a process is killed after any line of a module, or when the disk is full."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
import json, os, resource, sys
from pathlib import Path

folder, modules, sizes = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
every = int(sys.argv[4])
{setup}

def child(case, prepare):
    place = folder / case
    place.mkdir()
    begin(place)
    pid = os.fork()
    if pid == 0:
        prepare()
        try:
            work(place)
        except Exception as error:
            sys.settrace(None)
            print(json.dumps([case, "failed", f"{type(error).__name__}: {error}"]), flush=True)
            os._exit(0)
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code in (7, 9):
        print(json.dumps([case, {7: "done", 9: "killed"}[code], ""]), flush=True)
    return code

def dies_after(lines):
    def trace(frame, event, argument):
        nonlocal lines
        if not any(frame.f_code.co_filename.endswith(module) for module in modules):
            return None
        lines -= event == "line"
        if lines < 0:
            os._exit(9)
        return trace
    return lambda: sys.settrace(trace)

for size in sizes:
    child(f"{size} bytes", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
lines = 0
while child(f"{lines} lines", dies_after(lines)) == 9:
    lines += every
"""


@dataclass(frozen=True)
class Left:
    """What one case left on disk. ``ended`` is "done", "killed" or "failed" (with ``error``)."""

    folder: Path
    ended: str
    error: str


def cut_short(
    setup: str, folder: Path, modules: Sequence[str], sizes: Sequence[int] = (), every: int = 1
) -> list[Left]:
    """Runs `begin(folder)` and then `work(folder)` of `setup`, for each case in a separate process and folder.

    In one series of cases, the process is killed after one more line (or `every` lines) of the modules each time, until
    it completes. In the other, the size of its files is limited to each of `sizes` bytes.
    """
    arguments = [str(folder), json.dumps(list(modules)), json.dumps(list(sizes)), str(every)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{setup}", setup), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [Left(folder / case, ended, error) for case, ended, error in map(json.loads, done.stdout.splitlines())]
