"""Sandboxes of this machine: processes with limits, in namespaces where the kernel permits them.

    this process ──orders──▶ keeper ──forks──▶ first process of a sandbox ──forks──▶ commands
          └──────────── a socket for each sandbox ───────┘

Invariant: what a sandbox started has been killed and its folder is gone when `stop` returns. The keeper closes the
socket `life` then, and not before; `guest.keeper` says how it does so when this process or the keeper is killed.

The degree of isolation depends on what the kernel permits; `isolation` probes once. With namespaces, programs see a
root folder in memory, the interpreter, system libraries and nothing else of this machine. Without them they are
ordinary processes: of an unprivileged user if this process runs as root, otherwise of the same user, with that user's
rights to read files and signal processes. The kernel is shared: against code that attacks it, run everything in a
virtual machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megasync.concurrency.tasks import to_its_end
from megasync.errors import DataError, SandboxError, raised_as
from megasync.sandboxes.guest.frames import LENGTHS, lengths, packed, unpacked
from megasync.sandboxes.protocol import (
    OUTPUT_BYTES,
    Limits,
    Result,
    Snapshot,
    Spec,
    Stopping,
    archive_of,
    archive_of_folder,
)

log = logging.getLogger(__name__)

KEEPER = Path(__file__).parent / "guest" / "keeper.py"
# Isolated from this environment (-I), standard library only (-S), no bytecode files (-B).
OPTIONS = ["-I", "-S", "-B"]
# Not the virtual environment's interpreter, which reads a file of that environment that a program cannot see.
PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
PATH = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
# Seconds beyond its own limit in which a sandbox must have answered an order, and for those that have none.
_ANSWER_SECONDS = 60.0
_PROBE_SECONDS = 30.0
# Seconds in which the keeper must take an order.
_KEEPER_SECONDS = 10.0
# A folder's name identifies its owner: machine and container, process id, and start in clock ticks since boot.
_FOLDER = re.compile(r"megasync-sandbox-([0-9a-f]{8})-([0-9]+)-([0-9]+)-")


@dataclass(frozen=True, slots=True)
class Isolation:
    """How programs are kept apart on this machine."""

    # How namespaces are created: as root ("root"), as an ordinary user ("user"), or not at all (""). Only with them
    # programs have no network and cannot see this machine's files and processes.
    namespaces: str
    # Whether a program has a user id of its own.
    own_user: bool


@dataclass(frozen=True, slots=True)
class Ran:
    """A result with what only this package's callers ask: whether the command could be started at all."""

    result: Result
    started: bool


class Keeper:
    """The process that starts the sandboxes of this process; see `guest.keeper`."""

    _lock = threading.Lock()
    _shared: Keeper | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._numbers = itertools.count()
        # Sequenced packets keep each order together with its descriptors.
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(_KEEPER_SECONDS)
        with theirs:
            self.process = subprocess.Popen(
                [PYTHON, *OPTIONS, str(KEEPER), str(self.owner)],
                cwd="/",
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
                stdin=theirs.fileno(),
                start_new_session=True,
            )

    @classmethod
    def shared(cls) -> Keeper:
        """The keeper of this process: a new one if there is none, if it has died, or after a fork."""
        with cls._lock:
            kept = cls._shared
            if kept is None or kept.owner != os.getpid() or kept.process.poll() is not None:
                cls._shared = kept = cls()
            return kept

    def start(self, order: dict[str, Any], link: socket.socket | None) -> tuple[int, socket.socket, socket.socket]:
        """Has a sandbox started. Returns its number, the socket of its orders, and the one that closes at its end."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        life, kept = socket.socketpair()
        with theirs, kept:
            descriptors = [theirs.fileno(), kept.fileno(), *([link.fileno()] if link else [])]
            try:
                socket.send_fds(self._orders, [json.dumps({"start": number, **order}).encode()], descriptors)
            except OSError as error:
                ours.close()
                life.close()
                if order["folder"] is not None:
                    os.rmdir(order["folder"])
                raise SandboxError(f"the keeper of sandboxes does not take orders: {error}") from error
        return number, ours, life

    def end(self, number: int) -> None:
        """Has a sandbox ended. Does nothing if the keeper is gone, which has ended it."""
        with suppress(OSError):
            self._orders.send(json.dumps({"end": number}).encode())

    def close(self) -> None:
        """Ends the keeper with all its sandboxes."""
        self._orders.close()
        self.process.wait()


class _Ended(SandboxError):
    """A sandbox's first process has ended without an order."""


class LocalSandbox(Stopping):
    """A sandbox by its first process."""

    def __init__(self, spec: Spec, order: dict[str, Any], link: socket.socket | None = None) -> None:
        self._limits = spec.limits
        # Whether programs cannot reach the first process.
        self._protected = bool(order["namespaces"])
        self._folder = order["folder"]
        self._keeper = Keeper.shared()
        self._number, self._socket, self._life = self._keeper.start(order, link)
        self._socket.setblocking(False)
        self._life.setblocking(False)
        self._turn = asyncio.Lock()
        self._ending: asyncio.Future[None] | None = None

    async def ready(self) -> None:
        """Waits until it takes orders. Raises SandboxError if it could not be started."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._receive()
        except BaseException as error:
            await to_its_end(self.stop())
            if isinstance(error, TimeoutError):
                raise SandboxError(f"a sandbox did not start within {_ANSWER_SECONDS:g} s") from None
            raise

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> Result:
        order = {"command": command if isinstance(command, str) else list(command), "cwd": cwd, "env": dict(env or {})}
        ran = await self.carry_out(order, stdin, seconds, output_bytes)
        return ran.result

    async def carry_out(
        self, order: dict[str, Any], stdin: str = "", seconds: float | None = None, output_bytes: int = OUTPUT_BYTES
    ) -> Ran:
        """Runs an order of the kind `run`, which may be a check."""
        seconds = self._limits.wall_seconds if seconds is None else seconds
        env = {"PATH": PATH, "LANG": "C.UTF-8"} | order.get("env", {})
        order = {"op": "run", "cwd": "", **order, "env": env, "seconds": seconds, "output_bytes": output_bytes}
        try:
            answer, body = await self._ask(order, stdin.encode(errors="replace"), seconds + _ANSWER_SECONDS)
        except _Ended:
            if self._protected or self._keeper.process.poll() is not None:
                raise
            # Without namespaces a program can kill its first process. That is no fault of the machine.
            return Ran(Result(128 + signal.SIGKILL, "", ""), True)
        out, err = (part.decode(errors="replace") for part in (body[: answer["out"]], body[answer["out"] :]))
        return Ran(Result(answer["code"], out, err, any(answer["cut"])), answer["started"])

    async def put(self, files: Mapping[str, bytes] | Snapshot, path: str = "") -> None:
        archive = archive_of(files) if isinstance(files, Mapping) else files
        await self._done({"op": "put", "path": path}, archive, f"{path or 'the working folder'} cannot be written")

    async def get(self, path: str) -> bytes:
        order = {"op": "get", "path": path, "bytes": self._limits.file_mb * 2**20}
        return await self._done(order, b"", f"{path} cannot be read")

    async def snapshot(self) -> Snapshot:
        # An archive has a block for each file, and at least one more.
        most = self._limits.disk_mb * 2**20 + self._limits.files * 2**10 + 2**20
        return await self._done({"op": "get", "path": "/", "bytes": most}, b"", "no snapshot")

    async def kill(self) -> None:
        await self._ask({"op": "kill"}, b"", _ANSWER_SECONDS)

    async def stop(self) -> None:
        # Several tasks may stop it, and only one can wait for a socket.
        if self._ending is None:
            self._keeper.end(self._number)
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        """Waits until the keeper has closed the socket; it has deadlines for all that it does before."""
        with suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self._life, 1):
                pass
        self._socket.close()
        self._life.close()
        if self._folder is not None and self._keeper.process.poll() is not None:
            # It was killed before it could.
            await asyncio.to_thread(_remove, self._folder)

    async def _done(self, order: dict[str, Any], body: bytes, what: str) -> bytes:
        answer, content = await self._ask(order, body, _ANSWER_SECONDS)
        if answer["problem"]:
            raise DataError(f"{what} in the sandbox: {answer['problem'].strip().splitlines()[-1]}")
        return content

    async def _ask(self, order: dict[str, Any], body: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        async with self._turn:
            if self._ending is not None:
                raise SandboxError("the sandbox was stopped")
            try:
                async with asyncio.timeout(seconds):
                    loop = asyncio.get_running_loop()
                    with raised_as(SandboxError, "the sandbox has ended"):
                        await loop.sock_sendall(self._socket, packed(order, body))
                    return await self._receive()
            except BaseException as error:
                # The answer to this order would be taken for that to the next.
                await to_its_end(self.stop())
                if isinstance(error, TimeoutError):
                    raise SandboxError(f"the sandbox did not answer within {seconds:g} s") from None
                raise

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        try:
            header, body = lengths(await self._exactly(LENGTHS.size))
            answer, content = unpacked(await self._exactly(header)), await self._exactly(body)
        except (OSError, ValueError) as error:
            raise _Ended(f"the sandbox has ended: {str(error) or 'its first process is gone'}") from error
        if answer.get("broken"):
            raise SandboxError(f"a sandbox could not be set up or failed: {answer.get('problem')}")
        return answer, content

    async def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(count - len(parts), 2**20))
            if not part:
                raise OSError
            parts += part
        return bytes(parts)


class LocalStarter:
    """Starts sandboxes of the kind `process`."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._content: bytes | None = None

    async def start(self, snapshot: Snapshot | None = None) -> LocalSandbox:
        sandbox = LocalSandbox(self._spec, await self._order())
        await sandbox.ready()
        return await filled(sandbox, await self._folder() if snapshot is None else None, snapshot)

    async def close(self) -> None:
        """Does nothing: the keeper ends with this process."""

    async def _order(self) -> dict[str, Any]:
        kind = await asyncio.to_thread(isolation)
        return start_order(self._spec, kind)

    async def _folder(self) -> bytes | None:
        if self._spec.folder is not None and self._content is None:
            self._content = await folder_content(self._spec.folder)
        return self._content


async def folder_content(folder: str) -> bytes:
    """The archive of a folder from which sandboxes start. Raises DataError."""
    with raised_as(DataError, f"the folder {folder} of a sandbox cannot be read"):
        return await asyncio.to_thread(archive_of_folder, folder)


async def filled(sandbox: Any, folder: bytes | None, snapshot: bytes | None) -> Any:
    """The sandbox with the content of its folder or snapshot. Stops it if that cannot be written."""
    try:
        if folder is not None:
            await sandbox.put(folder)
        if snapshot is not None:
            await sandbox.put(snapshot, "/")
    except BaseException:
        await to_its_end(sandbox.stop())
        raise
    return sandbox


def start_order(spec: Spec, kind: Isolation, extra_bytes: int = 0) -> dict[str, Any]:
    """The order to the keeper for a sandbox. `extra_bytes` are written by this package beside the program's files."""
    folder = None
    if not kind.namespaces:
        folder = tempfile.mkdtemp(prefix=_prefix())
        if kind.own_user:
            os.chmod(folder, 0o711)
    return asdict(kind) | {
        "limits": asdict(spec.limits),
        "folder": folder,
        "image": spec.image,
        "visible": [*spec.visible],
        "network": spec.network,
        "extra_bytes": extra_bytes,
        "launcher": None,
    }


@cache
def isolation() -> Isolation:
    """The strongest isolation that works here, found by running a program in each. Raises SandboxError if none does.

    Sweeps before the first sandbox that has a folder.
    """
    problem = ""
    for kind in _kinds():
        problem = probe(kind)
        if not problem:
            if not kind.namespaces:
                sweep()
            return kind
        log.debug("Sandbox does not work with %s: %s", kind, problem)
    raise SandboxError(f"a sandbox cannot be started: {problem}")


def _kinds() -> list[Isolation]:
    """The kinds of isolation that this user may be able to create, strongest first."""
    kinds = [Isolation("user", False), Isolation("", False)]
    if os.geteuid() == 0:
        return [Isolation("root", True), kinds[0], Isolation("", True), kinds[1]]
    return kinds


def probe(kind: Isolation, limits: Limits | None = None) -> str:
    """Why programs cannot run with this isolation and within these limits; empty if they can."""
    return probe_order(start_order(Spec(limits=limits or Limits()), kind))


def probe_order(start: dict[str, Any]) -> str:
    """Why a program cannot run in a sandbox that is started so; empty if it can. Blocks."""
    keeper = Keeper.shared()
    number, ours, life = keeper.start(start, None)
    command = [PYTHON, *OPTIONS, "-c", "import json; print('works')"]
    order = {"op": "run", "command": command, "cwd": "", "env": {}, "seconds": _PROBE_SECONDS, "output_bytes": 4096}
    content = ""
    with ours, life:
        ours.settimeout(2 * _PROBE_SECONDS)
        try:
            answers = ours.makefile("rb")
            ours.sendall(packed(order))
            for _ in range(2):
                header, body = lengths(answers.read(LENGTHS.size))
                answer, content = unpacked(answers.read(header)), answers.read(body).decode(errors="replace")
                if answer.get("broken"):
                    return str(answer["problem"])
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the start of a message that never came
            return f"its first process ended ({error})"
        finally:
            keeper.end(number)
            with suppress(OSError):
                life.recv(1)
    return "" if content == "works\n" else content[-2000:] or "it printed nothing"


def sweep() -> None:
    """Removes the folders of sandboxes whose owner and keeper were both killed."""
    for path in _abandoned():
        log.info("Removing the abandoned sandbox %s", path)
        _remove(str(path))


def _remove(folder: str) -> None:
    if subprocess.run(["rm", "-rf", "--one-file-system", "--", folder], check=False).returncode != 0:
        log.warning("Sandbox %s could not be removed; remove it manually", folder)


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
