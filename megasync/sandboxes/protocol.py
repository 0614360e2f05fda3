"""The protocol of a sandbox: what every kind can do, and the limits within which it does it.

    async with await starter.start() as sandbox:
        await sandbox.put({"main.py": b"print(1)"})
        result = await sandbox.run("python3 main.py")
        copy = await starter.start(await sandbox.snapshot())

Invariant of every kind: when `stop` returns, or the owner's process ends in any way, all processes of the sandbox end
and nothing of it is left. Each kind says in its module what guarantees it. Failures of the sandbox itself are
SandboxErrors, which callers repeat elsewhere; what a command does wrong is in its result.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from megasync.concurrency.tasks import to_its_end
from megasync.errors import raised_as

# Seconds of a command that names no limit of its own, and how much of its output is kept.
RUN_SECONDS, OUTPUT_BYTES = 60.0, 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that programs of a sandbox may use."""

    # Per process.
    cpu_seconds: int = 4
    # Seconds after which everything is killed.
    wall_seconds: float = 10.0
    # Address space, per process; of containers the memory of all.
    memory_mb: int = 512
    # Size of each file.
    file_mb: int = 16
    # Per process.
    open_files: int = 64
    # All that is written, and its files and folders. Both need namespaces, and containers do not have them.
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


# Of a sandbox in which an agent works: builds and tests, not one small program.
WORK_LIMITS = Limits(
    cpu_seconds=600, wall_seconds=60.0, memory_mb=4096, file_mb=256, open_files=1024, disk_mb=512, files=65536,
    processes=256,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended. `code` is the exit status, 128 + n after signal n, None past the deadline.

    Outputs are cut at the length that the command was run with; `cut` says whether one was.
    """

    code: int | None
    stdout: str
    stderr: str
    cut: bool = False


# Everything that was written in a sandbox: a tar archive with paths relative to its root folder. A container's also
# tells what was deleted.
Snapshot = bytes


@dataclass(frozen=True)
class Spec:
    """The description of a sandbox before its start. `kind` is a key of `megasync.sandboxes.kinds.KINDS`."""

    kind: str = "process"
    # A root folder (process), or an image of Docker, Podman or Apptainer.
    image: str | None = None
    # A folder of this machine whose content is copied into the working folder.
    folder: str | None = None
    # Further folders of this machine that are visible, read-only, at the same place.
    visible: tuple[str, ...] = ()
    # Whether programs may use the network.
    network: bool = False
    # Address and key of a server of sandboxes (remote).
    url: str | None = None
    key: str | None = field(default=None, repr=False)
    limits: Limits = WORK_LIMITS

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Spec:
        """The specification of a mapping, as in a configuration. Raises TypeError that names the wrong option."""
        known = [each.name for each in fields(cls)]
        values: dict[str, object] = {}
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"a sandbox has no option {name!r}; it has {', '.join(known)}")
            values[name] = value
        for name, value in values.items():
            if name in ("kind", "image", "folder", "url", "key") and not isinstance(value, str | None):
                raise TypeError(f"{name}={value!r} of a sandbox must be text")
            if name == "network" and not isinstance(value, bool):
                raise TypeError(f"network={value!r} of a sandbox must be true or false")
        visible = values.pop("visible", ())
        if not isinstance(visible, list | tuple) or not all(isinstance(path, str) for path in visible):
            raise TypeError(f"visible={visible!r} of a sandbox must be a list of paths, such as [/usr/share]")
        limits = values.pop("limits", {})
        if not isinstance(limits, Mapping):
            raise TypeError(f"limits={limits!r} of a sandbox must be a mapping, such as {{memory_mb: 1024}}")
        merged = {name: getattr(WORK_LIMITS, name) for name in Limits.__slots__} | dict(limits)
        with raised_as(TypeError, "limits of a sandbox", f"it has {', '.join(Limits.__slots__)}", of=TypeError):
            return cls(**values, visible=tuple(visible), limits=Limits(**merged))  # pyright: ignore[reportArgumentType] - checked when it starts


class Sandbox(Protocol):
    """One sandbox. Its orders are carried out one after the other, in the order in which they were given.

    Paths are relative to the working folder, /work or that of a container's image, or absolute inside the sandbox.
    Whoever is cancelled while it waits for an order stops the sandbox.
    """

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
        """Runs a command, a text in a shell, to its end, or kills everything in the sandbox after `seconds`.

        `seconds` defaults to the limit `wall_seconds`. Processes that it leaves keep running.
        """
        ...

    async def put(self, files: Mapping[str, bytes] | Snapshot, path: str = "") -> None:
        """Writes files, by their names, or an archive, into a folder. Raises DataError if that is impossible."""
        ...

    async def get(self, path: str) -> bytes:
        """The content of a file, or an archive of a folder. Raises DataError for one that cannot be read."""
        ...

    async def snapshot(self) -> Snapshot:
        """All files that were written. Another sandbox that starts from it is a fork of this one, without processes."""
        ...

    async def kill(self) -> None:
        """Kills all processes of the sandbox. Its files stay."""
        ...

    async def stop(self) -> None:
        """Ends the sandbox and returns once nothing is left of it. May be called again."""
        ...


class Starter(Protocol):
    """Starts sandboxes of one specification."""

    async def start(self, snapshot: Snapshot | None = None) -> Sandbox:
        """A new sandbox, with the specified folder or the files of a snapshot. Raises SandboxError or ConfigError."""
        ...

    async def close(self) -> None:
        """Ends what was prepared. Sandboxes that were handed out belong to their users."""
        ...


class Stopping:
    """A sandbox as a context manager that stops it, also when the task is cancelled meanwhile."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await to_its_end(self.stop())

    async def stop(self) -> None:
        raise NotImplementedError


def archive_of(files: Mapping[str, bytes]) -> bytes:
    """An archive of files by their names. Those that begin with `#!` may be executed."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if content.startswith(b"#!") else 0o644
            tar.addfile(member, io.BytesIO(content))
    return target.getvalue()


def archive_of_folder(folder: str | Path) -> bytes:
    """An archive of all files of a folder of this machine, without owners and times. Raises OSError."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 0
        return member if member.isfile() or member.isdir() or member.issym() else None

    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", dereference=False) as tar:
        for path in sorted(Path(folder).iterdir()):
            tar.add(path, path.name, filter=plain)
    return target.getvalue()
