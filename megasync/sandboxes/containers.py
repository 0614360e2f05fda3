"""Sandboxes in containers of Docker, Podman or Apptainer, by their command lines.

    this process ──lines──▶ client of `run` ──▶ first process of the container, a shell that reads them
          └─────────────── client of `exec`, for each command ──▶ the command

Docker and Podman: the container ends with its first process, and is removed (`--rm`). That process ends with its input,
which this process holds, so the container ends with its owner, however that ends. When told to, it kills all others,
also if they are all that the container may have. None of them can kill it, because it is the container's first.

A command has begun when its wrapper has written a line. Before, a failure is the container's or its program's; after,
it is the command's, unless the first process no longer answers.

Apptainer makes a root folder of an image, from which sandboxes of the kind `process` start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import os
import resource
import secrets
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from megasync.base.files import home
from megasync.concurrency.tasks import cancel_and_wait, gather_or_cancel, to_its_end
from megasync.errors import ConfigError, DataError, SandboxError, raised_as
from megasync.sandboxes.local import LocalStarter, filled, folder_content
from megasync.sandboxes.protocol import OUTPUT_BYTES, Result, Snapshot, Spec, Stopping, archive_of

# Seconds in which a container must have started (its image may be pulled), in which orders without a limit end, and in
# which a container ends whose input was closed.
START_SECONDS, ORDER_SECONDS, STOP_SECONDS = 600.0, 120.0, 20.0
# The first process: says which limits the kernel enforces (control groups v2, or v1). At each line it reaps what
# programs have left, as every shell does, and kills all of them if that is the order. It starts no process for this.
_FIRST = """[ -d /work ] || mkdir /work
{ read -r memory < /sys/fs/cgroup/memory.max || read -r memory < /sys/fs/cgroup/memory/memory.limit_in_bytes
read -r processes < /sys/fs/cgroup/pids.max || read -r processes < /sys/fs/cgroup/pids/pids.max; } 2> /dev/null
echo "${memory:-max} ${processes:-max}"
while read -r order; do
    if [ "$order" = kill ]; then while kill -9 -1; do :; done; fi 2> /dev/null
    echo
done
exit 0"""
# The wrapper of a command.
_COMMAND = 'echo; cd -- "$1" || exit 127; shift; exec "$@"'
_NO_GROUPS = (
    "The kernel's control groups for memory and pids must be available to it: run it as root, or rootless with control "
    "groups v2 whose controllers are delegated to the user (systemd: Delegate=memory pids for user@.service, then log "
    "in again), and without cgroups=disabled in containers.conf. Otherwise use the kind process"
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PID_MAX = Path("/proc/sys/kernel/pid_max")
# Mounted by the programs in every container, which can neither be replaced nor removed.
_MOUNTED = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/.containerenv", "/.dockerenv")
# A member of snapshots: the names of the image that were deleted.
_DELETED = ".sandbox-deleted"
# GNU's tar takes a name for an escaped one.
_PACK = """tar --version | grep -q GNU && plain=--no-unquote
xargs -0 tar $plain -C / --no-recursion -cf -"""
# Which of some names are there. A program may have made anew what it had deleted.
_THERE = """cd / && xargs -0 sh -c 'for name; do
if [ -e "$name" ] || [ -L "$name" ]; then printf "%s\\0" "$name"; fi; done' sh"""
# Removes what no tar replaces: files where a snapshot has a folder (its name ends with a slash), and folders.
_CLEAR = """cd / && xargs -0 sh -c 'for name; do
if [ -d "${name%/}" ] && [ ! -L "${name%/}" ]; then [ "$name" != "${name%/}" ] || rm -rf -- "$name"
elif [ "$name" != "${name%/}" ]; then rm -f -- "${name%/}"; fi; done' sh"""
# Stands for the status of a command of which the container's program could not say that it began.
_NOT_BEGUN = -1


class Containers:
    """How one program's containers are started, entered and removed, as command lines."""

    def __init__(self, program: str, spec: Spec) -> None:
        _demand(program, spec)
        self.program = program
        self.spec = spec
        # Of its programs, as its image names it; empty for root. Known after the first start.
        self.user: str | None = None

    def start(self, name: str) -> list[str]:
        """The command whose input keeps a container alive."""
        limits = self.spec.limits
        command = [self.program, "run", "--interactive", "--rm", "--name", name]
        command += [] if self.spec.network else ["--network", "none"]
        command += ["--memory", f"{limits.memory_mb}m", "--pids-limit", str(limits.processes)]
        command += ["--ulimit", f"cpu={limits.cpu_seconds}", "--ulimit", f"fsize={limits.file_mb * 2**20}"]
        command += ["--ulimit", f"nofile={limits.open_files}", "--security-opt", "no-new-privileges"]
        # The first process of a container ignores other signals, and programs may write to its output without end.
        command += ["--stop-signal", "KILL", "--log-driver", "none"]
        if self.program == "podman":
            # Its default may be more than this process may set. As high as can be, because users' processes of all
            # containers are counted together.
            allowed, most = resource.getrlimit(resource.RLIMIT_NPROC)[1], int(_PID_MAX.read_text())
            command += ["--ulimit", f"nproc={min(allowed, most) if allowed != resource.RLIM_INFINITY else most}"]
        command += [word for path in self.spec.visible for word in ("--volume", f"{path}:{path}:ro")]
        return [*command, "--user", "0", "--entrypoint", "/bin/sh", "--", str(self.spec.image), "-c", _FIRST]

    def enter(self, name: str, cwd: str, env: Mapping[str, str], command: Sequence[str], root: bool) -> list[str]:
        """The command that runs another in a container, as the user of its image or as root."""
        options = ["--user", self.user] if self.user and not root else []
        options += [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
        return [self.program, "exec", "--interactive", *options, name, "/bin/sh", "-c", _COMMAND, "sh", cwd, *command]


class ContainerSandbox(Stopping):
    """A container of Docker or Podman, by the client of its first process, whose errors are in the file `said`."""

    def __init__(self, containers: Containers, name: str, holder: asyncio.subprocess.Process, said: IO[bytes]) -> None:
        self._containers = containers
        self._name = name
        self._holder = holder
        self._said = said
        self._limits = containers.spec.limits
        self._work = "/work" if containers.spec.folder else ""
        # Bytes of an archive, which has a block for each file.
        self._most = self._limits.disk_mb * 2**20 + self._limits.files * 2**10 + 2**20
        # User and group of its programs, as numbers.
        self._user = "0:0"
        self._turn = asyncio.Lock()
        self._ending: asyncio.Future[None] | None = None

    async def ready(self) -> None:
        """Waits until it takes orders. Raises SandboxError if it does not start, ConfigError if it has no limits."""
        containers, image = self._containers, self._containers.spec.image
        program = containers.program
        assert self._holder.stdout
        words: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                words = (await self._holder.stdout.readline()).decode(errors="replace").split()
                if len(words) != 2:
                    await self._holder.wait()
        if len(words) != 2:
            self._said.seek(0)
            said = self._said.read(2000).decode(errors="replace").strip() or f"no answer within {START_SECONDS:g} s"
            raise SandboxError(f"{program} starts no container of {image}: {said}{_hint(said)}")
        lost = [
            f"{name}={getattr(self._limits, name)}"
            for name, unit, held in (("memory_mb", 2**20, words[0]), ("processes", 1, words[1]))
            if not held.isdigit() or int(held) > getattr(self._limits, name) * unit
        ]
        if lost:
            raise ConfigError(f"{program} starts containers here without the limits {', '.join(lost)}. {_NO_GROUPS}")
        if containers.user is None:
            made_of = await self._asked("inspect", "--type", "container", "--format", "{{.Image}}", self._name)
            containers.user = await self._asked("image", "inspect", "--format", "{{.Config.User}}", made_of)
        if containers.user:
            who = await self._shell("id -u && id -g", f"the user {containers.user} cannot run programs")
            self._user = ":".join(who.decode().split())
            # The first process has made it, unless it is the image's.
            await self._shell(f"rmdir /work 2> /dev/null; {self._making('/work')}", "/work cannot be made", root=True)

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
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else [*command]
        content = stdin.encode(errors="replace")
        seconds = self._limits.wall_seconds if seconds is None else seconds
        code, out, err, cut = await self._inside(words, content, self._path(cwd), env or {}, seconds, output_bytes)
        return Result(code, out.decode(errors="replace"), err.decode(errors="replace"), cut)

    async def put(self, files: Mapping[str, bytes] | Snapshot, path: str = "") -> None:
        archive = archive_of(files) if isinstance(files, Mapping) else files
        folder, what = self._path(path), f"{path or 'the working folder'} cannot be written"
        unpack = f"{{ {self._making(folder)}; }} && tar -C {shlex.quote(folder)} -xf -"
        if folder == "/":
            # A snapshot, which has files of all users.
            first, last = await asyncio.to_thread(_removals, archive)
            await self._shell(_CLEAR, what, first, root=True)
            await self._shell(unpack, what, archive, root=True)
            if last:
                await self._shell("cd / && xargs -0 rm -rf --", what, last, root=True)
            return
        if self._user != "0:0":
            await self._shell(self._making(folder), what, root=True)
        await self._shell(unpack, what, archive)

    async def get(self, path: str) -> bytes:
        quoted = shlex.quote(self._path(path))
        return await self._shell(
            f"if [ -d {quoted} ]; then tar -C {quoted} -cf - .; elif [ -f {quoted} ] || [ ! -e {quoted} ]; "
            f"then cat {quoted}; else echo {quoted} is neither a file nor a folder >&2; exit 1; fi",
            f"{path} cannot be read",
        )

    async def snapshot(self) -> Snapshot:
        changed, deleted = _changes(await self._asked("diff", self._name), (*_MOUNTED, *self._containers.spec.visible))
        if deleted:
            changed = await self._shell(_THERE, "no snapshot", deleted, root=True) + changed
        # Several archives if the names are too many for one command, which not every tar can read from a file.
        parts = await self._shell(_PACK, "no snapshot", changed, root=True) if changed else b""
        return await asyncio.to_thread(_one_archive, parts, deleted)

    async def kill(self) -> None:
        async with self._order():
            await self._killed()

    async def stop(self) -> None:
        # Several tasks may stop it, and each returns when nothing is left.
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        """Has the container end, and removes it if it did not do so by itself."""
        assert self._holder.stdin and self._holder.stdout
        self._holder.stdin.close()
        # Its client cannot end before its output is read.
        rest = asyncio.ensure_future(_read(self._holder.stdout, bytearray(), 0))
        try:
            async with asyncio.timeout(STOP_SECONDS):
                code = await self._holder.wait()
        except TimeoutError:
            code = None
            with contextlib.suppress(ProcessLookupError):
                self._holder.kill()
            await self._holder.wait()
        await cancel_and_wait(rest)
        # 0: it has been removed. 125: it never was.
        if code not in (0, 125):
            remove = [self._containers.program, "rm", "--force", self._name]
            await _ran(remove, b"", ORDER_SECONDS, OUTPUT_BYTES)
        self._said.close()

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._work or '.'}/{path}".rstrip("/")

    def _making(self, folder: str) -> str:
        quoted = shlex.quote(folder)
        return f"[ -d {quoted} ] || {{ mkdir -p {quoted} && chown {self._user} {quoted}; }}"

    async def _asked(self, *words: str) -> str:
        """The answer of the container's program. Raises SandboxError."""
        command = [self._containers.program, *words]
        code, out, problem, cut = await _ran(command, b"", ORDER_SECONDS, self._most)
        if code != 0 or cut:
            said = problem.decode(errors="replace").strip()[-2000:] or "no whole answer"
            raise SandboxError(f"{' '.join(command)}: {said}")
        return os.fsdecode(out.removesuffix(b"\n"))

    async def _shell(self, command: str, what: str, stdin: bytes = b"", root: bool = False) -> bytes:
        """The output of an order of this module. Raises DataError, which begins with `what`, if it fails."""
        words = ["/bin/sh", "-c", command]
        # Root runs no program of a folder in which another user may write.
        env = {"PATH": _PATH} if root and self._containers.user else {}
        code, out, err, cut = await self._inside(words, stdin, ".", env, ORDER_SECONDS, self._most, root)
        if code is None:
            raise SandboxError(f"{what} in the sandbox: it took longer than {ORDER_SECONDS:g} s")
        if code != 0 or cut:
            said = f"more than {self._most} bytes" if cut else err.decode(errors="replace").strip()[-500:]
            raise DataError(f"{what} in the sandbox: {said}")
        return out

    @contextlib.asynccontextmanager
    async def _order(self) -> AsyncIterator[None]:
        """One order at a time. One that is cancelled, or at which the container fails, stops the sandbox."""
        async with self._turn:
            if self._ending is not None:
                raise SandboxError("the sandbox was stopped")
            try:
                yield
            except BaseException:
                await to_its_end(self.stop())
                raise

    async def _told(self, order: str = "") -> None:
        """Returns once the first process has carried out an order, or answered. Raises SandboxError if it does not."""
        assert self._holder.stdin and self._holder.stdout
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(ORDER_SECONDS):
                # On uvloop, which Ray's workers run, a write to a pipe that has closed is a RuntimeError.
                if not self._holder.stdin.is_closing():
                    self._holder.stdin.write(f"{order}\n".encode())
                    await self._holder.stdin.drain()
                if await self._holder.stdout.read(2**16):
                    return
        raise SandboxError(f"the container {self._name} has ended or does not answer")

    async def _killed(self) -> None:
        """Kills all processes but the first, which does it itself: there may be no room for one more."""
        await self._told("kill")
        if not self._containers.user:
            # Programs of the same user can read and answer what the first process is told. They are few enough now.
            again = ["/bin/sh", "-c", "kill -9 -1 2> /dev/null"]
            words = self._containers.enter(self._name, "/", {}, again, root=True)
            await _ran(words, b"", ORDER_SECONDS, OUTPUT_BYTES)

    async def _inside(
        self,
        command: Sequence[str],
        stdin: bytes,
        cwd: str,
        env: Mapping[str, str],
        seconds: float,
        most: int,
        root: bool = False,
    ) -> tuple[int | None, bytes, bytes, bool]:
        """Runs a command: its status (None if all was killed at the deadline), its outputs, and whether one was cut."""
        words = self._containers.enter(self._name, cwd, env, command, root)
        async with self._order():
            try:
                code, out, err, cut = await self._entered(words, stdin, seconds, most)
                # What programs have left may be all that the container may have. Or they have removed the shell, or put
                # something silent in its place.
                if code == _NOT_BEGUN and err and b"/bin/sh" not in err:
                    await self._killed()
                    code, out, err, cut = await self._entered(words, stdin, seconds, most)
            except (OSError, ValueError) as error:
                # Too long for any program, or with a NUL. Else this machine is at fault.
                if isinstance(error, OSError) and error.errno != errno.E2BIG:
                    raise SandboxError(f"{words[0]} cannot be run: {error}") from error
                return 127, b"", str(error).encode(), False
            await self._told()
            if code == _NOT_BEGUN and err and b"/bin/sh" not in err:
                raise SandboxError(f"{' '.join(words[:2])}: {err.decode(errors='replace')[-2000:]}{_hint(err)}")
            return 127 if code == _NOT_BEGUN else code, out, err, cut

    async def _entered(
        self, words: list[str], stdin: bytes, seconds: float, most: int
    ) -> tuple[int | None, bytes, bytes, bool]:
        client = await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert client.stdin and client.stdout and client.stderr
        out, err = bytearray(), bytearray()
        streams = None
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                begun = await client.stdout.read(1)
            parts = _write(client.stdin, stdin), _read(client.stdout, out, most), _read(client.stderr, err, most)
            streams = asyncio.ensure_future(gather_or_cancel(*parts))
            late = begun == b"\n" and not (await asyncio.wait([streams], timeout=seconds))[0]
            if late:
                await self._killed()
            async with asyncio.timeout(ORDER_SECONDS):
                cut = any(await streams)
                code = await client.wait()
            if begun != b"\n":
                return _NOT_BEGUN, b"", begun + out + err, cut
            return None if late else code, bytes(out), bytes(err), cut
        except TimeoutError:
            raise SandboxError(f"{' '.join(words[:2])} did not end within {ORDER_SECONDS:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
            if streams is not None:
                await cancel_and_wait(streams)
            await client.wait()


class ContainerStarter:
    """Starts containers of Docker or Podman."""

    def __init__(self, program: str, spec: Spec) -> None:
        self._containers = Containers(program, spec)
        self._content: bytes | None = None

    async def start(self, snapshot: Snapshot | None = None) -> ContainerSandbox:
        spec, name = self._containers.spec, f"megasync-{secrets.token_hex(8)}"
        if spec.folder is not None and self._content is None:
            self._content = await folder_content(spec.folder)
        said = tempfile.TemporaryFile()  # noqa: SIM115 - the sandbox closes it
        try:
            holder = await asyncio.create_subprocess_exec(
                *self._containers.start(name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        except BaseException:
            said.close()
            raise
        sandbox = ContainerSandbox(self._containers, name, holder, said)
        try:
            await sandbox.ready()
        except BaseException:
            await to_its_end(sandbox.stop())
            raise
        return await filled(sandbox, self._content if snapshot is None else None, snapshot)

    async def close(self) -> None:
        """Does nothing: containers end with their owner."""


def docker(spec: Spec) -> ContainerStarter:
    """Starts containers with Docker."""
    return ContainerStarter("docker", spec)


def podman(spec: Spec) -> ContainerStarter:
    """Starts containers with Podman."""
    return ContainerStarter("podman", spec)


class ApptainerStarter(LocalStarter):
    """Starts sandboxes of this machine whose root folder Apptainer has made of an image, once for all sandboxes.

    The image is anything that `apptainer build` takes: a .sif file, docker://name, a definition file. Programs can read
    it and not change it.
    """

    def __init__(self, spec: Spec) -> None:
        _demand("apptainer", spec)
        super().__init__(spec)
        self._made = asyncio.Lock()
        self._ready = False

    async def _order(self) -> dict[str, Any]:
        async with self._made:
            if not self._ready:
                self._spec = replace(self._spec, image=await _root_folder(str(self._spec.image)))
                self._ready = True
        return await super()._order()


async def _root_folder(image: str) -> str:
    """The root folder of an image, in the cache. Raises SandboxError with what Apptainer said."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "megasync" / "images"
    folder = cache / hashlib.sha256(image.encode()).hexdigest()[:16]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = f"{folder}.{secrets.token_hex(4)}"
        code, _, problem, _ = await _ran(["apptainer", "build", "--sandbox", draft, image], b"", START_SECONDS, 2**20)
        if code != 0:
            await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
            raise SandboxError(f"apptainer build of {image}: {problem.decode(errors='replace').strip()[-2000:]}")
        # Another process may have made it meanwhile.
        with contextlib.suppress(OSError):
            os.rename(draft, folder)
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    return str(folder)


def _demand(program: str, spec: Spec) -> None:
    """Raises ConfigError without an image, or on a machine without the program."""
    if spec.image is None:
        scheme = "docker://" if program == "apptainer" else ""
        raise ConfigError(f"a sandbox of kind {program} needs an image, such as {{image: {scheme}python:3.12-slim}}")
    if shutil.which(program) is None:
        raise ConfigError(
            f"sandbox kind {program}: the program {program} is not on the PATH; install it, or use the kind process"
        )


async def _ran(
    command: Sequence[str], stdin: bytes, seconds: float, most: int
) -> tuple[int | None, bytes, bytes, bool]:
    """Runs a command of this machine: its status (None past the deadline), its outputs, and whether one was cut."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin and process.stdout and process.stderr
    outputs = bytearray(), bytearray()
    streams = [_read(process.stdout, outputs[0], most), _read(process.stderr, outputs[1], most)]
    code = None
    try:
        async with asyncio.timeout(seconds):
            cut = await gather_or_cancel(_write(process.stdin, stdin), *streams)
            code = await process.wait()
    except TimeoutError:
        cut = [True]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return code, bytes(outputs[0]), bytes(outputs[1]), any(cut)


async def _write(stream: asyncio.StreamWriter, content: bytes) -> bool:
    # On uvloop, which Ray's workers run, a write to a pipe that has closed is a RuntimeError.
    with contextlib.suppress(ConnectionError):
        if not stream.is_closing():
            stream.write(content)
        await stream.drain()
    stream.close()
    return False


async def _read(stream: asyncio.StreamReader, output: bytearray, most: int) -> bool:
    """Reads a stream to its end and keeps up to `most` bytes. Returns whether there were more."""
    cut = False
    while part := await stream.read(2**16):
        cut |= len(output) + len(part) > most
        output += part[: most - len(output)]
    return cut


def _changes(diff: str, without: Sequence[str]) -> tuple[bytes, bytes]:
    """The names that were added or changed, and those that were deleted, of a list by a container's program.

    Each begins with "./" and ends with NUL. A name with a line break is left out.
    """
    found: list[tuple[bytes, bytes]] = []
    for line in os.fsencode(diff).split(b"\n"):
        if line[:3] in (b"A /", b"C /", b"D /"):
            found.append((line[:1], line[2:]))
        elif found:
            found.pop()
    outside = tuple(f"{path}/".encode() for path in without)
    changed, deleted = bytearray(), bytearray()
    for kind, name in found:
        if not (name + b"/").startswith(outside):
            names = deleted if kind == b"D" else changed
            names += b"." + name + b"\0"
    return bytes(changed), bytes(deleted)


def _one_archive(parts: bytes, deleted: bytes) -> bytes:
    """The archive of several that follow each other, and of the names that were deleted."""
    target = io.BytesIO()
    # A block of zeros is an empty archive.
    with (
        tarfile.open(fileobj=io.BytesIO(parts or bytes(512)), ignore_zeros=True) as source,
        tarfile.open(fileobj=target, mode="w") as tar,
    ):
        for member in source:
            tar.addfile(member, source.extractfile(member) if member.isreg() else None)
        if deleted:
            member = tarfile.TarInfo(_DELETED)
            member.size = len(deleted)
            tar.addfile(member, io.BytesIO(deleted))
    return target.getvalue()


def _removals(archive: bytes) -> tuple[bytes, bytes]:
    """The names that are to be cleared before a snapshot is unpacked, and to be removed after it. Raises DataError."""
    refused = raised_as(DataError, "a snapshot is not an archive (tar)", of=(tarfile.TarError, OSError, EOFError))
    with refused, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {os.fsencode(f"./{os.path.normpath(member.name)}"): member for member in tar}
        content = tar.extractfile(members[kept]) if (kept := f"./{_DELETED}".encode()) in members else None
        deleted = content.read().split(b"\0")[:-1] if content else []
    first = [name + b"/" * member.isdir() for name, member in members.items()]
    first += [name for name in deleted if name in members]
    last = [name for name in [*deleted, kept] if name not in members or name == kept] if deleted else []
    return b"".join(name + b"\0" for name in first), b"".join(name + b"\0" for name in last)


def _hint(said: str | bytes) -> str:
    text = said if isinstance(said, str) else said.decode(errors="replace")
    return f". {_NO_GROUPS}" if "cgroup" in text else ""
