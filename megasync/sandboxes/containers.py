"""Sandboxes in containers of Docker, Podman or Apptainer, by their command lines.

Docker and Podman: the container runs `cat` for as long as its client's input is open, and is removed when `cat` ends
(`--rm`). This process holds that input, so the container ends with it, however it ends. Apptainer makes a root folder
of an image, from which sandboxes of the kind `process` start.

Snapshots of containers have the files that were added or changed. A file of the image that was deleted is there again
in a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megasync.concurrency.tasks import gather_or_cancel, to_its_end
from megasync.errors import ConfigError, DataError, SandboxError
from megasync.sandboxes.local import LocalStarter, filled, folder_content
from megasync.sandboxes.protocol import OUTPUT_BYTES, Result, Snapshot, Spec, Stopping, archive_of

# Seconds in which a container must have started (its image may be pulled), and in which orders without a limit end.
START_SECONDS, ORDER_SECONDS = 600.0, 120.0
# Clears the way for what is written next, and kills what a container's user started; both need a shell in the image.
_UNPACK = "mkdir -p {path} && tar -C {path} -xf -"
_KILL = "kill -9 -1"
_MOST = 2**31


class Containers:
    """How one program's containers are started, entered and removed, as command lines."""

    def __init__(self, program: str, spec: Spec) -> None:
        _demand(program, spec)
        self.program = program
        self.spec = spec

    def start(self, name: str) -> list[str]:
        """The command whose input keeps a container alive."""
        limits = self.spec.limits
        command = [self.program, "run", "--interactive", "--rm", "--name", name]
        command += [] if self.spec.network else ["--network", "none"]
        command += ["--memory", f"{limits.memory_mb}m", "--pids-limit", str(limits.processes)]
        command += ["--ulimit", f"cpu={limits.cpu_seconds}", "--ulimit", f"fsize={limits.file_mb * 2**20}"]
        command += ["--ulimit", f"nofile={limits.open_files}", "--security-opt", "no-new-privileges"]
        command += [word for path in self.spec.visible for word in ("--volume", f"{path}:{path}:ro")]
        return [*command, "--entrypoint", "cat", str(self.spec.image)]

    def enter(self, name: str, cwd: str, env: Mapping[str, str], command: Sequence[str]) -> list[str]:
        """The command that runs another in a container."""
        options = ["--workdir", cwd] if cwd else []
        options += [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
        return [self.program, "exec", "--interactive", *options, name, *command]


class ContainerSandbox(Stopping):
    """A container of Docker or Podman."""

    def __init__(self, containers: Containers, name: str, holder: asyncio.subprocess.Process) -> None:
        self._containers = containers
        self._name = name
        self._holder = holder
        self._limits = containers.spec.limits
        self._work = "/work" if containers.spec.folder else ""
        self._turn = asyncio.Lock()
        self._stopped = False

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
        words = ["sh", "-c", command] if isinstance(command, str) else [*command]
        seconds = self._limits.wall_seconds if seconds is None else seconds
        code, out, err, cut = await self._inside(words, stdin.encode(), cwd, env or {}, seconds, output_bytes)
        if code is None:
            await self.kill()
        return Result(code, out.decode(errors="replace"), err.decode(errors="replace"), cut)

    async def put(self, files: Mapping[str, bytes] | Snapshot, path: str = "") -> None:
        archive = archive_of(files) if isinstance(files, Mapping) else files
        await self._shell(_UNPACK.format(path=shlex.quote(self._path(path) or ".")), archive)

    async def get(self, path: str) -> bytes:
        quoted = shlex.quote(self._path(path))
        return await self._shell(f"if [ -d {quoted} ]; then tar -C {quoted} -cf - .; else cat {quoted}; fi")

    async def snapshot(self) -> Snapshot:
        code, changes, problem, _ = await _ran(
            [self._containers.program, "diff", self._name], b"", ORDER_SECONDS, _MOST
        )
        if code != 0:
            raise SandboxError(f"{self._containers.program} diff: {problem.decode(errors='replace')[-2000:]}")
        lines = changes.decode(errors="replace").splitlines()
        names = [line[3:] for line in lines if line[:2] in ("A ", "C ")]
        return await self._shell("tar -C / --no-recursion -cf - -T -", "\n".join(names).encode())

    async def kill(self) -> None:
        await self._inside(["sh", "-c", _KILL], b"", "", {}, ORDER_SECONDS, OUTPUT_BYTES)

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._holder.stdin is not None:
            self._holder.stdin.close()
        await _ran([self._containers.program, "rm", "--force", self._name], b"", ORDER_SECONDS, OUTPUT_BYTES)
        with contextlib.suppress(ProcessLookupError):
            self._holder.kill()
        await self._holder.wait()

    def _path(self, path: str) -> str:
        return path if path.startswith("/") or not self._work else f"{self._work}/{path}"

    async def _shell(self, command: str, stdin: bytes = b"") -> bytes:
        code, out, err, _ = await self._inside(["sh", "-c", command], stdin, "", {}, ORDER_SECONDS, _MOST)
        if code != 0:
            raise DataError(f"{command} failed in the sandbox: {err.decode(errors='replace')[-500:]}")
        return out

    async def _inside(
        self, command: Sequence[str], stdin: bytes, cwd: str, env: Mapping[str, str], seconds: float, most: int
    ) -> tuple[int | None, bytes, bytes, bool]:
        if self._stopped or self._holder.returncode is not None:
            raise SandboxError(f"the container {self._name} has ended")
        async with self._turn:
            try:
                place = self._path(cwd).rstrip("/") if cwd or self._work else ""
                return await _ran(self._containers.enter(self._name, place, env, command), stdin, seconds, most)
            except asyncio.CancelledError:
                await to_its_end(self.stop())
                raise


class ContainerStarter:
    """Starts containers of Docker or Podman."""

    def __init__(self, program: str, spec: Spec) -> None:
        self._containers = Containers(program, spec)
        self._content: bytes | None = None

    async def start(self, snapshot: Snapshot | None = None) -> ContainerSandbox:
        spec, name = self._containers.spec, f"megasync-{secrets.token_hex(8)}"
        if spec.folder is not None and self._content is None:
            self._content = await folder_content(spec.folder)
        holder = await asyncio.create_subprocess_exec(
            *self._containers.start(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        sandbox = ContainerSandbox(self._containers, name, holder)
        try:
            await self._answers(sandbox, holder)
        except BaseException:
            await to_its_end(sandbox.stop())
            raise
        return await filled(sandbox, self._content if snapshot is None else None, snapshot)

    async def close(self) -> None:
        """Does nothing: containers end with their owner."""

    async def _answers(self, sandbox: ContainerSandbox, holder: asyncio.subprocess.Process) -> None:
        """Returns once a command runs in the container. Raises SandboxError with what its program said."""
        try:
            async with asyncio.timeout(START_SECONDS):
                while holder.returncode is None:
                    # Not in the working folder, which this command makes: to enter one that is missing fails.
                    if (await sandbox.run("mkdir -p /work", cwd="/")).code == 0:
                        return
                    await asyncio.sleep(0.1)
        except (TimeoutError, SandboxError):
            pass
        problem = b""
        if holder.returncode is not None and holder.stderr is not None:
            problem = await holder.stderr.read(2000)
        program = self._containers.program
        said = problem.decode(errors="replace").strip() or f"no answer within {START_SECONDS:g} s"
        raise SandboxError(f"{program} starts no container of {self._containers.spec.image}: {said}")


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
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megasync" / "images"
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
        raise ConfigError(f"a sandbox of kind {program} needs an image, such as {{image: 'docker://python:3.12-slim'}}")
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
    with contextlib.suppress(ConnectionError):
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
