"""Runs untrusted Python programs, each in a process of its own with resource limits.

    run_program    a program reads its input and prints; the caller compares the output
    run_check      Python text, such as asserts, runs against a program: two sandboxes, joined by a socket

Invariants:

- The result never depends on anything that the program can reach. Expected outputs stay in this process. A check runs
  in a sandbox of its own, to which the program can send only plain data (`sandbox_link`), and its text is in no file,
  argument or environment.
- When a call returns or is cancelled, everything that the program started has been killed and its folder is gone;
  `_Sandbox.end` guarantees it. This cleanup never blocks the event loop, whatever the program left.

The degree of isolation depends on what the kernel permits; `isolation` probes once. With namespaces a program sees the
interpreter, shared libraries and nothing else of this machine. Without them it is an ordinary process: of an
unprivileged user if this process runs as root, otherwise of the same user, with that user's rights to read files and
signal processes. Total memory and CPU time of all its processes are limited only by `processes` times the limits of
one, and by `wall_seconds`. The kernel is shared: against code that attacks it, run the whole training in a virtual
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
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

_warned = False
_CHILD = Path(__file__).with_name("sandbox_child.py")
# What a check runs, in the order of imports. The first is also what serves a check in the program's process.
_LINK = ("sandbox_link", "sandbox_stand_ins", "sandbox_check")
# Isolated from this environment (-I), standard library only (-S), no bytecode files (-B).
_OPTIONS = ["-I", "-S", "-B"]
# Not the virtual environment's interpreter, which reads a file of that environment that a program cannot see.
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
# The exit status of a check that ran to its end, as in `sandbox_child`.
_PASSED = 42
# Seconds that a sandbox has to clean up before it is killed; needed only without namespaces.
_END_SECONDS = 8.0
_REMOVE_SECONDS = 120.0
# Seconds that a program has to exit after its check has failed.
_PROGRAM_SECONDS = 1.0
_PROBE_SECONDS = 30.0
# A folder's name identifies its owner: machine and container, process id, and start in clock ticks since boot.
_FOLDER = re.compile(r"megasync-sandbox-([0-9a-f]{8})-([0-9]+)-([0-9]+)-")


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that a program may use."""

    # Per process.
    cpu_seconds: int = 4
    # Seconds after which everything is killed.
    wall_seconds: float = 10.0
    # Address space, per process.
    memory_mb: int = 512
    # Size of each file.
    file_mb: int = 16
    # Per process.
    open_files: int = 64
    # All that is written, and its files and folders. Both need namespaces.
    disk_mb: int = 64
    files: int = 1024
    # Processes and threads that run at once. Needs namespaces or a separate user id.
    processes: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            integer = name != "wall_seconds"
            if isinstance(value, bool) or not isinstance(value, int if integer else int | float) or not value > 0:
                raise TypeError(f"{name}={value!r} must be {'an integer' if integer else 'a number'} above 0")


@dataclass(frozen=True, slots=True)
class Check:
    """Python text that tests a program."""

    text: str
    # The names that it takes from the program.
    names: tuple[str, ...] = ()
    # Text that runs before it.
    prelude: str = ""
    # The names under which it imports the program.
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """`code` is the exit status, 128 + n after signal n, None past the deadline. Outputs are cut at 1 MiB each."""

    code: int | None
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Isolation:
    """How programs are kept apart on this machine."""

    # How namespaces are created: as root ("root"), as an ordinary user ("user"), or not at all (""). Only with them
    # programs have no network and cannot see this machine's files and processes.
    namespaces: str
    # Whether a program has a user id of its own.
    own_user: bool


async def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
    """Runs Python source to its end, or kills it after `limits.wall_seconds`. Raises OSError when it cannot be started.

    Only the standard library is available. The working folder is empty, temporary and private to the program.
    """
    limits = limits or Limits()
    order = {"files": {"program.py": source, "stdin": stdin}, "command": [_PYTHON, *_OPTIONS, "{root}/program.py"]}
    async with _Sandbox(order, limits) as sandbox:
        try:
            async with asyncio.timeout(limits.wall_seconds):
                return await sandbox.result()
        except TimeoutError:
            return ProgramResult(None, "", "")


async def run_check(source: str, check: Check, limits: Limits | None = None) -> bool:
    """Whether a check passes with the names that a program defines, within `limits.wall_seconds`.

    Each runs in a sandbox of its own; see `sandbox_check` for what a check can do with a program. Raises OSError when
    one cannot be started.
    """
    limits = limits or Limits()
    code = _link_code()
    program_order = {
        "files": {"program.py": source, "link.py": next(iter(code.values()))},
        "command": [_PYTHON, *_OPTIONS, "{root}/link.py"],
    }
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with (
            _Sandbox({"files": {}, "check": asdict(check), "code": code}, limits, ours) as check_sandbox,
            _Sandbox(program_order, limits, theirs) as program_sandbox,
        ):
            # Both processes have inherited the sockets. If this process kept one open, neither process would notice
            # the end of the other.
            ours.close()
            theirs.close()
            try:
                async with asyncio.timeout(limits.wall_seconds):
                    result = await check_sandbox.result()
                if not (passed := result.code == _PASSED):
                    log.debug("Check failed: %s", result.stderr)
                    _warn_of_objects(result.stderr)
                    # The program exits after its check. If it never started, `result` raises OSError, because the
                    # program is not at fault.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PROGRAM_SECONDS):
                            await program_sandbox.result()
            except TimeoutError:
                return False
            return passed


def _warn_of_objects(problem: str) -> None:
    """Says once that a test failed because it computes with an object of the program."""
    global _warned
    if "ProgramObject" in problem and not _warned:
        _warned = True
        log.warning(
            "A test failed because it needs data where the program returned an object, or does with an object what the "
            "code reward does not support. If right programs fail it too, change the test; see docs/code_reward.md. %s",
            problem.strip()[-300:],
        )


@cache
def isolation() -> Isolation:
    """The strongest isolation that works here, found by running a program in each. Raises OSError when none works."""
    problem = ""
    for kind in _kinds():
        problem = probe(kind)
        if not problem:
            return kind
        log.debug("Sandbox does not work with %s: %s", kind, problem)
    raise OSError(f"a sandbox cannot be started: {problem}")


def _kinds() -> list[Isolation]:
    """The kinds of isolation that this user may be able to create, strongest first."""
    kinds = [Isolation("user", False), Isolation("", False)]
    if os.geteuid() == 0:
        return [Isolation("root", True), kinds[0], Isolation("", True), kinds[1]]
    return kinds


@cache
def _link_code() -> dict[str, str]:
    """The text of each module of the link, by its full name."""
    package = __name__.rpartition(".")[0]
    return {f"{package}.{name}": Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in _LINK}


async def sweep() -> None:
    """Removes the folders of sandboxes whose owner process is gone."""
    for path in await asyncio.to_thread(_abandoned):
        log.info("Removing the abandoned sandbox %s", path)
        await _remove(path)


class _Sandbox:
    """One run of `sandbox_child`, from its start to its end."""

    def __init__(self, order: dict[str, Any], limits: Limits, link: socket.socket | None = None) -> None:
        self._order = order | {"limits": asdict(limits), "link": link.fileno() if link else None}
        # The process, and the exchange of the order for the result.
        self._run: tuple[asyncio.subprocess.Process, asyncio.Task[tuple[bytes, bytes]]] | None = None
        self._folder: Path | None = None

    async def __aenter__(self) -> Self:
        kind = await asyncio.to_thread(isolation)
        if not kind.namespaces:
            self._folder = Path(tempfile.mkdtemp(prefix=_prefix()))
            if kind.own_user:
                self._folder.chmod(0o711)
        self._order |= asdict(kind) | {"folder": str(self._folder)}
        try:
            process = await asyncio.create_subprocess_exec(
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
        self._run = process, asyncio.create_task(process.communicate(json.dumps(self._order).encode()))
        return self

    async def __aexit__(self, *_: object) -> None:
        # Runs to its end even if the caller is cancelled.
        ending = asyncio.ensure_future(self.end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait({ending})
            raise

    async def result(self) -> ProgramResult:
        """Waits for the program to end. Raises OSError when it was not started."""
        if self._run is None:
            raise OSError("a sandbox was not started")
        process, exchange = self._run
        out, err = await asyncio.shield(exchange)
        if out:
            return ProgramResult(**json.loads(out))
        code = process.returncode
        if code is not None and code < 0:
            return ProgramResult(128 - code, "", "")
        raise OSError(f"a sandbox could not be set up (exit status {code}): {err.decode(errors='replace')[-2000:]}")

    async def end(self) -> None:
        """Kills the program and everything that it started, and removes its folder."""
        if self._run is not None:
            process, exchange = self._run
            if self._folder is not None and process.returncode is None:
                # Only this process knows which descendants have left its process group.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_SECONDS):
                        await process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            # A surviving descendant would hold the pipes open.
            exchange.cancel()
            await asyncio.wait({exchange})
            process._transport.close()  # pyright: ignore[reportAttributeAccessIssue] - asyncio has no public way
        if self._folder is not None:
            await _remove(self._folder)


async def _remove(folder: Path) -> None:
    """Removes a folder of any depth and size, in another process: shutil.rmtree recurses, and would block this one."""
    remover = await asyncio.create_subprocess_exec(
        *("rm", "-rf", "--one-file-system", "--", str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_REMOVE_SECONDS):
            await remover.wait()
    except TimeoutError:
        remover.kill()
        await remover.wait()
    if folder.exists():  # noqa: ASYNC240 - one look at a local folder
        log.warning("Sandbox %s could not be removed within %g s; remove it manually", folder, _REMOVE_SECONDS)


def _prefix() -> str:
    return f"megasync-sandbox-{_place()}-{os.getpid()}-{_started(os.getpid())}-"


@cache
def _place() -> str:
    """Where process ids mean the same: containers and machines may share a folder for temporary files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it does not exist."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def _abandoned() -> list[Path]:
    """Folders of this user's sandboxes whose owner process is gone."""
    owners = {path: _FOLDER.match(path.name) for path in Path(tempfile.gettempdir()).glob("megasync-sandbox-*")}
    return [
        path
        for path, owner in owners.items()
        if owner
        and owner[1] == _place()
        and path.lstat().st_uid == os.geteuid()
        and _started(int(owner[2])) != int(owner[3])
    ]


def probe(kind: Isolation, limits: Limits = Limits()) -> str:
    """Why programs cannot run with this isolation and within these limits; empty if they can."""
    with tempfile.TemporaryDirectory(prefix=_prefix()) as folder:
        if kind.own_user:
            os.chmod(folder, 0o711)
        order = {
            "files": {"program.py": "import json; print('works')"},
            "command": [_PYTHON, *_OPTIONS, "{root}/program.py"],
            "limits": asdict(limits),
            "link": None,
            "folder": folder,
        }
        try:
            probe = subprocess.run(
                [_PYTHON, *_OPTIONS, str(_CHILD)],
                input=json.dumps(order | asdict(kind)),
                capture_output=True,
                text=True,
                timeout=_PROBE_SECONDS,
                check=False,
            )
            answer = json.loads(probe.stdout) if probe.stdout else {"stdout": "", "stderr": probe.stderr}
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}"
    return "" if answer["stdout"] == "works\n" else answer["stderr"][-2000:] or "it printed nothing"
