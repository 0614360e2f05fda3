"""Runs Python programs that nobody has read, each in a process of its own with limits on what it can use up.

    run_program    a program reads its input and prints; whoever called compares the output
    run_check      Python text, such as asserts, runs against a program: two sandboxes, joined by a socket

Invariants:

- What a verdict depends on never is where the program is. Expected outputs stay in this process; a check runs in a sandbox
  of its own, to which the program can send plain data only (`sandbox_link`), and its text is in no file, argument or
  environment.
- When a call returns or is cancelled, what the program started has been killed and its folder is gone; `_Sandbox.end`
  guarantees it. Neither holds up the event loop, whatever the program left behind.

How far a program is set apart depends on what the kernel permits; `isolation` asks once. With namespaces it sees the
interpreter, shared libraries and nothing else of this machine. Without them it is an ordinary process: of a user without
rights where this process is root's, else of the same user, who can read and signal what that user can. Memory and processor
time of all its processes together are not limited, but by `processes` times the limits of one, and by `wall_seconds`. The
kernel itself is the same: against code that attacks it, run the whole training in a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_LINK = Path(__file__).with_name("sandbox_link.py")
# Isolated from this environment (-I), standard library only (-S), and writing no bytecode (-B).
_OPTIONS = ["-I", "-S", "-B"]
# The one of a virtual environment reads a file of it that a program does not see.
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
# The exit status of a check that ran to its end, as in `sandbox_child`.
_PASSED = 42
# Seconds that a sandbox has to put itself away before it is killed; it needs them only without namespaces.
_END_SECONDS = 8.0
_REMOVE_SECONDS = 120.0
# Seconds that a program has to end once its check has failed.
_PLAYER_SECONDS = 1.0
_PROBE_SECONDS = 30.0
# A folder says who made it: process id and start, in clock ticks since the machine's.
_FOLDER = re.compile(r"megasync-sandbox-(\d+)-(\d+)-")


@dataclass(frozen=True, slots=True)
class Limits:
    """`cpu_seconds`, `memory_mb` (address space) and `open_files` are of one process, `file_mb` of one file.

    `disk_mb` and `files` (folders too) are of all that it writes together, `processes` (threads too) of all that run at
    once; these three need namespaces, the last one at least a user id of its own. `wall_seconds` ends everything.
    """

    cpu_seconds: int = 4
    wall_seconds: float = 10.0
    memory_mb: int = 512
    file_mb: int = 16
    open_files: int = 64
    disk_mb: int = 64
    files: int = 1024
    processes: int = 64

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


@dataclass(frozen=True, slots=True)
class Isolation:
    """`namespaces` is how they are made: by root's rights ("root"), by an ordinary user's ("user"), or not at all ("").

    With `own_user` a program has a user id that nothing else has.
    """

    namespaces: str
    own_user: bool


async def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Runs Python source to its end, or kills it after `limits.wall_seconds`. Raises OSError when it cannot be started.

    Standard library only. The working folder is empty, temporary and the program's own.
    """
    limits = limits or Limits()
    order = {"files": {"program.py": source, "stdin": stdin}, "command": [_PYTHON, *_OPTIONS, "{root}/program.py"]}
    async with _Sandbox(order, limits) as sandbox:
        try:
            return await asyncio.wait_for(sandbox.outcome(), limits.wall_seconds)
        except TimeoutError:
            return Outcome(None, "", "")


async def run_check(source: str, check: str, limits: Limits | None = None) -> bool:
    """Whether Python text comes to its end with the names that a program defines, within `limits.wall_seconds`.

    The two run in sandboxes of their own; see `sandbox_link` for what a check can do with a program. Raises OSError when
    one cannot be started.
    """
    limits = limits or Limits()
    code = _link_code()
    player_order = {"files": {"program.py": source, "link.py": code}, "command": [_PYTHON, *_OPTIONS, "{root}/link.py"]}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with (
            _Sandbox({"files": {}, "check": check, "code": code}, limits, ours) as referee,
            _Sandbox(player_order, limits, theirs) as player,
        ):
            # They have them now: as long as this process held one, neither would see the end of the other.
            ours.close()
            theirs.close()
            try:
                outcome = await asyncio.wait_for(referee.outcome(), limits.wall_seconds)
                if not (passed := outcome.code == _PASSED):
                    log.debug("a check failed: %s", outcome.stderr)
                    # It ends with the other; where it never began, that is no verdict on the program.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(player.outcome(), _PLAYER_SECONDS)
            except TimeoutError:
                return False
            return passed


@cache
def isolation() -> Isolation:
    """The strongest that works here: each is tried with a program. Raises OSError when none does."""
    root = os.geteuid() == 0
    kinds = (
        [Isolation("root", True), Isolation("user", False), Isolation("", True)] if root else [Isolation("user", False)]
    )
    for kind in [*kinds, Isolation("", False)]:
        problem = _probe(kind)
        if not problem:
            return kind
        log.debug("programs cannot be run with %s: %s", kind, problem)
    raise OSError(f"a sandbox cannot be started: {problem}")


@cache
def _link_code() -> str:
    return _LINK.read_text(encoding="utf-8")


def network_is_cut() -> bool:
    """Whether programs run without network, and without sight of this machine's files and processes."""
    return bool(isolation().namespaces)


async def sweep() -> None:
    """Removes the folders of sandboxes whose process was killed. Never those of one that lives."""
    for path in await asyncio.to_thread(_abandoned):
        log.info("removing the sandbox %s, whose process has ended", path)
        await _remove(path)


class _Sandbox:
    """One run of `sandbox_child`, from its start to its end."""

    def __init__(self, order: dict[str, Any], limits: Limits, link: socket.socket | None = None) -> None:
        self._order = order | {"limits": asdict(limits), "link": link.fileno() if link else None}
        self._process: asyncio.subprocess.Process | None = None
        self._talk: asyncio.Task[tuple[bytes, bytes]] | None = None
        self._folder: Path | None = None

    async def __aenter__(self) -> Self:
        kind = await asyncio.to_thread(isolation)
        if not kind.namespaces:
            self._folder = Path(tempfile.mkdtemp(prefix=_prefix()))
            if kind.own_user:
                self._folder.chmod(0o711)
        self._order |= asdict(kind) | {"folder": str(self._folder)}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(_PYTHON, *_OPTIONS, str(_CHILD)),
                cwd="/",
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[self._order["link"]] if self._order["link"] is not None else [],
                start_new_session=True,
            )
        except BaseException:
            await self.end()
            raise
        self._talk = asyncio.create_task(self._process.communicate(json.dumps(self._order).encode()))
        return self

    async def __aexit__(self, *_: object) -> None:
        # To its end, also where whoever waits is cancelled.
        ending = asyncio.ensure_future(self.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise

    async def outcome(self) -> Outcome:
        """What became of the program. Raises OSError when it was not started."""
        out, err = await asyncio.shield(self._talk)
        if out:
            return Outcome(**json.loads(out))
        code = self._process.returncode
        if code < 0:
            return Outcome(128 - code, "", "")
        raise OSError(f"a sandbox could not be set up (exit status {code}): {err.decode(errors='replace')[-2000:]}")

    async def end(self) -> None:
        """Kills the program with all that it started, and removes its folder."""
        if self._process is not None:
            if self._folder is not None and self._process.returncode is None:
                # It alone knows what has left its group.
                self._signal(signal.SIGTERM, group=False)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), _END_SECONDS)
            self._signal(signal.SIGKILL, group=True)
            await self._process.wait()
            # A descendant that survived would hold its pipes open.
            self._talk.cancel()
            await asyncio.wait({self._talk})
            self._process._transport.close()
        if self._folder is not None:
            await _remove(self._folder)

    def _signal(self, number: int, *, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self._process.pid, number)


async def _remove(folder: Path) -> None:
    """Removes a folder of any depth and size, in another process: Python's own way recurses, and takes this one's time."""
    remover = await asyncio.create_subprocess_exec(
        *("rm", "-rf", "--one-file-system", "--", str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await asyncio.wait_for(remover.wait(), _REMOVE_SECONDS)
    except TimeoutError:
        remover.kill()
        await remover.wait()
    if folder.exists():
        log.warning("the sandbox %s could not be removed within %g s; remove it by hand", folder, _REMOVE_SECONDS)


def _prefix() -> str:
    return f"megasync-sandbox-{os.getpid()}-{_started(os.getpid())}-"


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine's start; None when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def _abandoned() -> list[Path]:
    found = []
    for path in Path(tempfile.gettempdir()).glob("megasync-sandbox-*"):
        owner = _FOLDER.match(path.name)
        if owner and path.lstat().st_uid == os.geteuid() and _started(int(owner[1])) != int(owner[2]):
            found.append(path)
    return found


def _probe(kind: Isolation) -> str:
    """Why programs cannot be run in this way; empty when they can."""
    with tempfile.TemporaryDirectory(prefix=_prefix()) as folder:
        if kind.own_user:
            os.chmod(folder, 0o711)
        order = {
            "files": {"program.py": "import json; print('works')"},
            "command": [_PYTHON, *_OPTIONS, "{root}/program.py"],
            "limits": asdict(Limits()),
            "link": None,
            "folder": folder,
        }
        try:
            asked = subprocess.run(
                [_PYTHON, *_OPTIONS, str(_CHILD)],
                input=json.dumps(order | asdict(kind)),
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
            answer = json.loads(asked.stdout) if asked.stdout else {"stdout": "", "stderr": asked.stderr}
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}"
    return "" if answer["stdout"] == "works\n" else answer["stderr"][-2000:] or "it printed nothing"
