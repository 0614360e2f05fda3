"""Starts the sandboxes of one process, and ends them: a small process, so that each start is a fork of little memory.

Invariants:

- No sandbox outlives its owner or this process. It watches the owner by a descriptor of its process, and ends all
  sandboxes when that has ended; a sandbox's first process gets a signal when this one ends.
- A sandbox has ended when the socket `life` that came with its order is closed: its processes are reaped then, and its
  folder is removed. `reap` alone closes it.
- Nothing that a sandbox is told passes through here, so no sandbox inherits another's data in its memory.

Runs as a script; standard library only: `keeper.py OWNER`, where OWNER is the process id of its parent and the standard
input a socket of orders: {"start": number, ...} with the sandbox's descriptors, and {"end": number}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# An isolated interpreter does not look beside the script.
sys.path.insert(0, str(Path(__file__).parent))

from frames import packed
from inside import KILL_SECONDS, Sandbox, children
from namespaces import (
    FIRST_USER,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    clone,
    map_user,
    new_root,
    prctl,
    visible_paths,
)

ORDER_BYTES = 2**20
# Seconds that a sandbox without namespaces has to kill its processes before it is killed itself.
END_SECONDS = 8.0
# Seconds until a folder that cannot be removed is left to the next sweep.
REMOVE_SECONDS = 120.0


@dataclass
class Started:
    """A sandbox by its first process, or by what removes its folder afterwards."""

    number: int
    life: socket.socket
    folder: str | None
    # Whether a signal may not end it at once, because only it knows its descendants.
    reaps: bool
    # When it is killed, on the monotonic clock.
    deadline: float | None = None
    removed: bool = False


@dataclass
class Keeper:
    """The sandboxes by the id of the process that is waited for."""

    orders: socket.socket
    started: dict[int, Started] = field(default_factory=dict)

    def serve(self, owner: int) -> None:
        """Carries out orders until the owner has ended, or closed the socket."""
        watched = os.pidfd_open(os.getppid())
        if os.getppid() != owner:
            return
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        poll = select.poll()
        for number in (watched, woken, self.orders.fileno()):
            poll.register(number, select.POLLIN)
        serving = True
        while serving or self.started:
            ready = {number for number, _ in poll.poll(self.patience())}
            if woken in ready:
                os.read(woken, 4096)
            self.reap()
            self.kill_late()
            if serving and self.orders.fileno() in ready:
                serving = self.order()
            if serving and watched in ready:
                serving = False
            if not serving and ready & {watched, self.orders.fileno()}:
                for number in (watched, self.orders.fileno()):
                    with contextlib.suppress(KeyError):
                        poll.unregister(number)
                for started in [*self.started.values()]:
                    self.end(started.number)

    def patience(self) -> float | None:
        """Milliseconds until a sandbox is late in ending."""
        deadlines = [started.deadline for started in self.started.values() if started.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 if deadlines else None

    def order(self) -> bool:
        """Carries out one order. Returns False if the owner has gone."""
        text, descriptors, _, _ = socket.recv_fds(self.orders, ORDER_BYTES, 4)
        if not text:
            return False
        order = json.loads(text)
        if "end" in order:
            self.end(order["end"])
            return True
        owner, life = (socket.socket(fileno=number) for number in descriptors[:2])
        links = descriptors[2:]
        pid = self.start(order, owner, links[0] if links else None, life)
        owner.close()
        for link in links:
            os.close(link)
        if pid:
            reaps = not order["namespaces"] and not order["launcher"]
            self.started[pid] = Started(order["start"], life, order["folder"], reaps)
        else:
            if order["folder"] is not None:
                os.rmdir(order["folder"])
            life.close()
        return True

    def start(self, order: dict[str, Any], owner: socket.socket, link: int | None, life: socket.socket) -> int:
        """Starts a sandbox's first process. Returns its id, 0 if that is impossible, which the owner is told."""
        namespaces, launcher = order["namespaces"], order["launcher"]
        user = os.geteuid(), os.getegid()
        try:
            pid = clone(namespaces, order["network"]) if namespaces and not launcher else os.fork()
        except OSError as error:
            owner.sendall(packed({"problem": str(error), "broken": True}))
            return 0
        if pid:
            return pid
        # Beyond this point in the child alone.
        try:
            signal.set_wakeup_fd(-1)
            life.close()
            become(order, owner, link, user, {started.life for started in self.started.values()} | {self.orders})
        except BaseException:  # noqa: BLE001 - the owner is told
            with contextlib.suppress(OSError):
                owner.sendall(packed({"problem": traceback.format_exc()[-2000:], "broken": True}))
        finally:
            os._exit(1)

    def end(self, number: int) -> None:
        """Ends a sandbox; `reap` does the rest."""
        for pid, started in self.started.items():
            if started.number == number and not started.removed:
                os.kill(pid, signal.SIGTERM if started.reaps else signal.SIGKILL)
                started.deadline = time.monotonic() + END_SECONDS if started.reaps else None

    def kill_late(self) -> None:
        for pid, started in self.started.items():
            if started.deadline is not None and time.monotonic() >= started.deadline:
                started.deadline = None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Removes what ended sandboxes have left, and then says that they have ended."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if (started := self.started.pop(pid, None)) is None:
                    continue
                if started.reaps and not started.removed:
                    self.kill_strays()
                if started.folder is None or started.removed:
                    started.life.close()
                    continue
                started.removed, started.deadline = True, time.monotonic() + REMOVE_SECONDS
                # Another process: a tree of any depth and size would block this one.
                remover = ["rm", "-rf", "--one-file-system", "--", started.folder]
                self.started[os.posix_spawnp("rm", remover, os.environ)] = started

    def kill_strays(self) -> None:
        """Kills what a sandbox without namespaces leaves if its first process was killed: this process inherits it."""
        deadline = time.monotonic() + KILL_SECONDS
        while (strays := [child for child in children() if child not in self.started]) and time.monotonic() < deadline:
            for stray in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
            for stray in strays:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(stray, 0)


def become(
    order: dict[str, Any], owner: socket.socket, link: int | None, user: tuple[int, int], others: set[socket.socket]
) -> NoReturn:
    """In the child: the first process of a sandbox, as the order describes it."""
    for other in others:
        other.close()
    if order["launcher"]:
        launch(order, owner)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    # The id in the process space whose /proc is still mounted.
    own = FIRST_USER + int(os.readlink("/proc/self")) if order["own_user"] else None
    root = ""
    if order["namespaces"]:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if order["namespaces"] == "user":
            map_user(*user)
        paths = visible_paths(order["image"], order["visible"], order["network"])
        new_root(paths, order["limits"]["disk_mb"] * 2**20 + order["extra_bytes"], order["limits"]["files"])
    else:
        root = order["folder"]
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    sandbox = Sandbox(owner, link, order, root, own)
    if not order["namespaces"]:
        # If this keeper or the owner dies, only this process can kill the programs.
        signal.signal(signal.SIGTERM, lambda *_: (sandbox.kill_rest(), os._exit(128 + signal.SIGTERM)))
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        os.setsid()
    sandbox.serve()


def launch(order: dict[str, Any], owner: socket.socket) -> NoReturn:
    """In the child: becomes a program that makes the sandbox and runs `inside` in it, with the socket as its input."""
    own = json.dumps(FIRST_USER + os.getpid() if order["own_user"] else None)
    command = [part.replace("{user}", own) for part in order["launcher"]]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(owner.fileno(), 0)
    os.dup2(2, 1)
    os.execvp(command[0], command)


def main() -> None:
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    orders = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The owner decides when sandboxes end; a signal to its group must not.
        signal.signal(number, signal.SIG_IGN)
    Keeper(orders).serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
