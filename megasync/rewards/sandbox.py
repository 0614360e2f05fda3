"""Runs a Python program that nobody has read, in a process of its own with limits on what it can use up.

Invariant: when `run` returns or is cancelled, the program's process group has been killed and its folder is gone;
`_end` guarantees it.

This is *not* a security boundary. The program runs as the same user: it can read what that user can read. It has no
secrets in its environment, no network where `network_is_cut` says so, and wall time is limited for all that it starts.
Other limits are of one process or one file: how many processes and files it makes is not limited, and so neither are
their processor time, memory and disk together. Against code that means harm, run the whole training in a container or
virtual machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
# Isolated from this environment (-I), standard library only (-S), and writing no bytecode (-B).
_PYTHON = [sys.executable, "-I", "-S", "-B"]
# What a program prints beyond this is not looked at.
_OUTPUT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """`cpu_seconds`, `memory_mb` (address space) and `open_files` are of one process, `file_mb` of one file; a program
    that starts others gets them once for each, until `wall_seconds` end all of them."""

    cpu_seconds: int = 4
    wall_seconds: float = 10.0
    memory_mb: int = 512
    file_mb: int = 16
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            whole = name != "wall_seconds"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
                raise TypeError(f"{name}={value!r} must be a {'whole ' if whole else ''}number above 0")


@dataclass(frozen=True, slots=True)
class Outcome:
    """`code` is the exit status, 128 + n after signal n, None past the deadline. Outputs are cut at 1 MiB each."""

    code: int | None
    stdout: str
    stderr: str


async def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Runs Python source to its end, or kills it after `limits.wall_seconds`. Raises OSError when it cannot be started.

    Standard library only. The working folder is empty, temporary and the program's own.
    """
    limits = limits or Limits()
    folder = Path(tempfile.mkdtemp(prefix="megasync-sandbox-"))
    try:
        (folder / "main.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        code = await _run(folder, limits)
        return Outcome(code, _head(folder / "stdout"), _head(folder / "stderr"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def network_is_cut() -> bool:
    """Whether this kernel lets an ordinary user's program be started without network. Asks once."""
    answer = subprocess.run([*_PYTHON, str(_CHILD), "--probe"], capture_output=True, timeout=30, check=False)
    return answer.returncode == 0 and json.loads(answer.stdout) is True


async def _run(folder: Path, limits: Limits) -> int | None:
    order = {"limits": asdict(limits), "command": [*_PYTHON, str(folder / "main.py")]}
    work = folder / "work"
    work.mkdir()
    # Files, not pipes: their size is limited like any other file's, and nobody has to read along.
    with (
        (folder / "stdin").open("rb") as stdin,
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
    ):
        process = await asyncio.create_subprocess_exec(
            *(*_PYTHON, str(_CHILD), json.dumps(order)),
            cwd=work,
            env={"PATH": "/usr/bin:/bin", "HOME": str(work), "LANG": "C.UTF-8"},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        return await asyncio.wait_for(process.wait(), limits.wall_seconds)
    except TimeoutError:
        return None
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills the whole group: also when its leader has ended, others of it may live."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await process.wait()


def _head(path: Path) -> str:
    with path.open("rb") as output:
        return output.read(_OUTPUT_BYTES).decode("utf-8", "replace")
