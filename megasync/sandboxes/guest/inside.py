"""The first process of a sandbox: carries out its owner's orders, one after the other, until their socket is closed.

Invariant: every order runs in a child with the rights of the sandbox's programs, so this process, which those cannot
reach, does nothing that a program could lead astray. When it ends, the kernel kills all processes of its namespace;
without namespaces it kills its descendants, which the kernel re-parents to it.

    run       a command, or a check (`check`), with its input; answers with the exit status and the output
    put       unpacks an archive in a folder
    get       a file, or an archive of a folder; the root folder's has all that was written
    kill      all processes of the sandbox

Standard library only. With bubblewrap it runs as a script; otherwise as a fork of the keeper.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import resource
import select
import signal
import socket
import stat
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# An isolated interpreter does not look beside the script.
sys.path.insert(0, str(Path(__file__).parent))

from frames import LENGTHS, PASSED, lengths, packed, unpacked
from namespaces import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, prctl, switch_user

# Descriptor of the link, in programs and checks.
LINK = 3
# Seconds for killing the descendants of a program.
KILL_SECONDS = 5.0
# Bytes of a failed order's explanation.
PROBLEM_BYTES = 2000


class OwnerGone(Exception):
    """The owner has closed the socket."""


class Sandbox:
    """The state of a sandbox's first process. `root` is the folder before every absolute path, "" for "/"."""

    def __init__(self, owner: socket.socket, link: int | None, order: dict[str, Any], root: str, user: int | None):
        self.owner = owner
        self.link = link
        self.root = root
        self.user = user
        self.limits: dict[str, Any] = order["limits"]
        # Whether all processes are in namespaces of their own, so that the kernel ends them with this one.
        self.first = bool(order["namespaces"])
        # Names in the root folder that are not the sandbox's own.
        self.system: set[str] = set()
        # SIGCHLD writes to it, so that one `poll` waits for children and for the owner.
        self.woken, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> NoReturn:
        """Answers orders until the owner has gone."""
        for name in ("work", "tmp"):
            os.makedirs(f"{self.root}/{name}", exist_ok=True)
        os.chmod(f"{self.root}/tmp", 0o1777)
        if self.user is not None:
            for name in ("", "tmp", "work"):
                os.chown(f"{self.root}/{name}", self.user, self.user)
        self.system = {*os.listdir(f"{self.root}/")} - {"tmp", "work"}
        orders = {"run": self.run, "put": self.put, "get": self.get, "kill": self.kill}
        try:
            self.owner.sendall(packed({"ready": True}))
            while True:
                order, body = self.receive()
                answer, content = orders[order["op"]](order, body)
                self.owner.sendall(packed(answer, content))
        except OwnerGone:
            pass
        except BaseException:  # noqa: BLE001 - the owner is told
            with contextlib.suppress(OSError):
                self.owner.sendall(packed({"problem": traceback.format_exc()[-PROBLEM_BYTES:], "broken": True}))
        finally:
            if not self.first:
                self.kill_rest()
            os._exit(0)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        header, body = lengths(self.exactly(LENGTHS.size))
        return unpacked(self.exactly(header)), self.exactly(body)

    def exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self.wait_for_owner()
            part = self.owner.recv(min(count - len(parts), 2**20))
            if not part:
                raise OwnerGone
            parts += part
        return bytes(parts)

    def wait_for_owner(self) -> None:
        """Returns once the owner has written or gone. Reaps what programs have left meanwhile."""
        while not any(number == self.owner.fileno() for number in self.poll(None, owner=True)):
            self.reap()

    def poll(self, seconds: float | None, owner: bool = False) -> list[int]:
        """The descriptors that became readable: of ended children, and of the owner's socket or its end."""
        events = select.poll()
        events.register(self.woken, select.POLLIN)
        events.register(self.owner, select.POLLIN if owner else select.POLLRDHUP)
        ready = [number for number, _ in events.poll(None if seconds is None else max(0, seconds) * 1000)]
        if self.woken in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.woken, 4096):
                    pass
        return ready

    def reap(self, child: int | None = None) -> int | None:
        """The exit status of `child` if it has ended. Reaps all that have."""
        code = None
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == child:
                    code = os.waitstatus_to_exitcode(found[1])
                    code = 128 - code if code < 0 else code
        return code

    def wait(self, child: int, seconds: float | None) -> int | None:
        """The exit status of a child; None if it did not end within `seconds`. Raises OwnerGone."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (code := self.reap(child)) is None:
            if self.owner.fileno() in self.poll(None if deadline is None else deadline - time.monotonic()):
                raise OwnerGone
            if deadline is not None and time.monotonic() >= deadline:
                return self.reap(child)
        return code

    def fork(self, action: Callable[[], object], stderr: int, started: mmap.mmap | None = None) -> int:
        """Runs an action in a child that the program's signals cannot tell from another. Returns its process id.

        `started` becomes 0 again if the action raised an error; the traceback goes to `stderr`.
        """
        if child := os.fork():
            return child
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the owner is told
            if started is not None:
                started[0] = 0
            # Closed if the action has already made it its own.
            with contextlib.suppress(OSError):
                os.dup2(stderr, 2)
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(127)

    # ---- orders

    def run(self, order: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], bytes]:
        files = [memory_file(name) for name in ("stdin", "stdout", "stderr")]
        os.write(files[0], stdin)
        os.lseek(files[0], 0, os.SEEK_SET)
        for output in files[1:]:
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
        # Memory that the child shares until it becomes the program.
        started = mmap.mmap(-1, 1)
        child = self.fork(lambda: self.execute(order, files, started), files[2], started)
        if self.link is not None:
            # If this process kept it open, the other end would not notice the end of the program.
            os.close(self.link)
            self.link = None
        code = self.wait(child, order["seconds"])
        if code is None:
            self.kill_rest()
        most = order["output_bytes"]
        out, err = (os.pread(output, most, 0) for output in files[1:])
        sizes = [os.fstat(output).st_size for output in files[1:]]
        answer = {"code": code, "started": bool(started[0]), "out": len(out), "cut": [size > most for size in sizes]}
        for number in files:
            os.close(number)
        started.close()
        return answer, out + err

    def execute(self, order: dict[str, Any], files: list[int], started: mmap.mmap) -> None:
        """In the child: becomes the program, or runs the check, and sets the shared byte `started` right before."""
        # Opened as this user, because the program's may not be allowed to pass the folders above.
        root = os.open(f"{self.root}/", os.O_PATH)
        os.chdir(self.path(order["cwd"]))
        switch_user(self.user)
        for name, text in order.get("files", {}).items():
            target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=root)
            with open(target, "w", encoding="utf-8", errors="replace", newline="") as file:
                file.write(text)
        for number, file in enumerate(files):
            os.dup2(file, number)
        if self.link is not None:
            os.dup2(self.link, LINK) if self.link != LINK else None
            os.set_inheritable(LINK, True)
        os.closerange(LINK + (self.link is not None), 2**16)
        self.limit()
        if "check" in order:
            # No process of any user may read the memory of this one.
            prctl(PR_SET_DUMPABLE, 0)
            *_, check = [loaded(name, text) for name, text in order["code"].items()]
            started[0] = 1
            os._exit(PASSED if check.passes(LINK, order["check"]) else 1)
        command = order["command"]
        if isinstance(command, str):
            command = ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", command]
        command = [part.replace("{root}", self.root) for part in command]
        env = {"HOME": f"{self.root}/work", **order["env"]}
        # It may be given by its name alone.
        where = [""] if "/" in command[0] else [f"{path}/" for path in env.get("PATH", "/usr/bin:/bin").split(":")]
        paths = [path + command[0] for path in where]
        path = next((path for path in paths if os.path.exists(path)), command[0])
        started[0] = 1
        os.execve(path, command, env)

    def limit(self) -> None:
        limits, megabyte = self.limits, 2**20
        resource_limits = [
            (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
            (resource.RLIMIT_AS, limits["memory_mb"] * megabyte, limits["memory_mb"] * megabyte),
            (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte, limits["file_mb"] * megabyte),
            (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
            (resource.RLIMIT_CORE, 0, 0),
        ]
        # Counted per user id; before Linux 5.14 a user namespace did not separate the counts.
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if self.user is not None or (self.first and release >= (5, 14)):
            resource_limits.append((resource.RLIMIT_NPROC, limits["processes"], limits["processes"]))
        for what, soft, hard in resource_limits:
            allowed = resource.getrlimit(what)[1]
            if allowed != resource.RLIM_INFINITY:
                soft, hard = min(soft, allowed), min(hard, allowed)
            resource.setrlimit(what, (soft, hard))
        prctl(PR_SET_NO_NEW_PRIVS, 1)

    def put(self, order: dict[str, Any], archive: bytes) -> tuple[dict[str, Any], bytes]:
        def unpack() -> None:
            os.makedirs(self.path(order["path"]), exist_ok=True)
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                # What an archive may do, every program here may.
                tar.extraction_filter = lambda member, _: member
                tar.extractall(self.path(order["path"]), self.own(tar), numeric_owner=True)

        return self.done_by_child(unpack)

    def own(self, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        """The members of an archive, as files of the sandbox's user."""
        for member in tar:
            member.uid, member.gid = os.geteuid(), os.getegid()
            if member.isfile() or member.isdir() or member.issym() or member.islnk():
                yield member

    def get(self, order: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        result = memory_file("result")

        def read() -> None:
            path = self.path(order["path"])
            if os.path.isdir(path):
                with io.FileIO(result, "w", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as tar:
                    archive(path, tar, self.system if order["path"] == "/" else set())
                return
            source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise OSError(f"{order['path']} is neither a file nor a folder")
            copy(source, result, order["bytes"])

        try:
            answer, _ = self.done_by_child(read)
            if answer["problem"]:
                return answer, b""
            size = os.fstat(result).st_size
            if size > order["bytes"]:
                return {"problem": f"{order['path']} has {size} bytes or more, and the limit is {order['bytes']}"}, b""
            return answer, os.pread(result, size, 0)
        finally:
            os.close(result)

    def kill(self, *_: object) -> tuple[dict[str, Any], bytes]:
        self.kill_rest()
        return {"problem": ""}, b""

    # ---- processes and files

    def done_by_child(self, action: Callable[[], object]) -> tuple[dict[str, Any], bytes]:
        """Runs an action with the rights of a program. Answers with its error, "" if there is none."""
        problem = memory_file("problem")
        try:

            def as_program() -> None:
                switch_user(self.user)
                action()

            code = self.wait(self.fork(as_program, problem), None)
            size = os.fstat(problem).st_size
            text = os.pread(problem, PROBLEM_BYTES, max(0, size - PROBLEM_BYTES)).decode(errors="replace")
            return {"problem": text or f"exit status {code}" if code else ""}, b""
        finally:
            os.close(problem)

    def path(self, name: str) -> str:
        return self.root + name if name.startswith("/") else f"{self.root}/work/{name}"

    def kill_rest(self) -> None:
        """Kills all processes of the sandbox but this one, until it has no child."""
        deadline = time.monotonic() + KILL_SECONDS
        if self.user is not None and not self.first:
            # All processes of the user at once, so that none escapes by forking.
            if not (killer := os.fork()):
                switch_user(self.user)
                os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(killer, 0)
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                if self.first:
                    os.kill(-1, signal.SIGKILL)
                for child in () if self.first else children():
                    os.kill(child, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)


def memory_file(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)


def copy(source: int, target: int, most: int) -> None:
    """Copies up to `most` bytes, and one more if there are more."""
    while (part := os.read(source, 2**20)) and os.fstat(target).st_size <= most:
        os.write(target, part)


def archive(folder: str, tar: tarfile.TarFile, without: set[str]) -> None:
    """Adds the files of a folder, with paths relative to it, but for some names in it.

    A program may have made trees of any depth and files that cannot be read: those are left out. So is what is mounted.
    """
    folders, device = [""], os.stat(folder).st_dev
    while folders:
        base = folders.pop()
        with contextlib.suppress(OSError), os.scandir(f"{folder}/{base}") as entries:
            for entry in entries:
                if base or entry.name not in without:
                    name = f"{base}/{entry.name}" if base else entry.name
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_dev == device:
                            add(tar, f"{folder}/{name}", name)
                            folders += [name] * entry.is_dir(follow_symlinks=False)


def add(tar: tarfile.TarFile, path: str, name: str) -> None:
    """Adds a file, a folder without its content, or a symbolic link. Raises OSError if it cannot be read."""
    kept, content = os.lstat(path), b""
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(kept.st_mode), kept.st_mtime
    if stat.S_ISDIR(kept.st_mode):
        member.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(kept.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISREG(kept.st_mode):
        # It may be another file by now.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            content = file.read(kept.st_size)
        member.size = len(content)
    else:
        return
    tar.addfile(member, io.BytesIO(content))


def loaded(name: str, text: str) -> Any:
    sys.modules[name] = module = type(sys)(name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def children() -> list[int]:
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        pids.append(int(name))
            except OSError:
                pass
    return pids


def main() -> NoReturn:
    """Runs `inside.py ORDER` in namespaces that somebody else has made, with the socket as standard input."""
    prctl(PR_SET_DUMPABLE, 0)
    owner = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    header = unpacked(sys.argv[1].encode())
    Sandbox(owner, None, header, "", header["user"]).serve()


if __name__ == "__main__":
    main()
