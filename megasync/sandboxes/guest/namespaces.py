"""Namespaces and the root folder of a sandbox, by system calls of the standard library's `ctypes`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
# Keeps the interpreter's lock in a call: the child of a clone has no other thread that could give it back.
LIBC = ctypes.PyDLL(None, use_errno=True)
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000

# User ids of sandboxes: this plus the process id, so that no two sandboxes share one. No system assigns ids this high.
FIRST_USER = 1_900_000_000
INSIDE_USER = 1000
# Inodes that the root folder needs beyond the program's own files.
OWN_FILES = 128
# Mount point of the new root: a folder that every Linux has and no interpreter is installed in.
ROOT = "/sys"
# Of the host, read-only: what programs need, and nothing of a user.
SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
FILES = ("/etc/ld.so.cache", *(f"/dev/{name}" for name in ("null", "zero", "random", "urandom")))
# For programs that may use the network.
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/usr/share/ca-certificates")
# Folders that belong to the sandbox, also if it starts from a root folder that has them.
OWN = ("dev", "proc", "sys", "tmp", "work")


def call(function: Callable[..., int], *arguments: Any) -> None:
    if function(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function.__name__}{arguments}: {os.strerror(error)}")


def prctl(option: int, value: int) -> None:
    LIBC.prctl(option, value, 0, 0, 0)


def clone(kind: str, network: bool) -> int:
    """Forks into new namespaces, "root" or "user". Returns the child's process id, 0 in the child."""
    if platform.machine() not in SYS_CLONE:
        raise OSError(f"namespaces are not supported on {platform.machine()}")
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | (0 if network else CLONE_NEWNET)
    if kind == "user":
        flags |= CLONE_NEWUSER
    pid = LIBC.syscall(SYS_CLONE[platform.machine()], ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0)
    if pid < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"namespaces: {os.strerror(error)}")
    return pid


def map_user(user: int, group: int) -> None:
    """Makes this process, in new namespaces of an ordinary user, `INSIDE_USER` of them."""
    # A process that is not dumpable cannot write its own files in /proc.
    prctl(PR_SET_DUMPABLE, 1)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_USER} {user} 1"),
        ("gid_map", f"{INSIDE_USER} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    prctl(PR_SET_DUMPABLE, 0)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    call(LIBC.mount, *texts[:3], ctypes.c_ulong(flags), texts[3])


def visible_paths(image: str | None, visible: Sequence[str], network: bool) -> list[tuple[str, str]]:
    """The paths of the host that a sandbox sees, read-only: pairs of the path there and the path inside."""
    python = [os.path.join(sys.base_prefix, name) for name in ("bin", "lib", "lib64")]
    paths = [*(() if image else (*SYSTEM, *python)), *FILES, *(NETWORK if network else ()), *visible]
    entries = (
        [(f"{image}/{name}", f"/{name}") for name in sorted(os.listdir(image)) if name not in OWN] if image else []
    )
    taken = {inside for _, inside in entries}
    return [*entries, *((path, path) for path in paths if "/" + path.split("/")[1] not in taken)]


def bind(source: str, target: str) -> None:
    """Makes a path of the host visible, read-only, below a new root."""
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        open(target, "w").close()
    mount(source, target, flags=MS_BIND | MS_REC)
    added = MS_NOSUID | (0 if "/dev/" in target else MS_RDONLY | MS_NODEV)
    # The first three flags of a mount have the same bits here. With all that is mounted below, since Linux 5.12.
    attributes = (ctypes.c_uint64 * 4)(added, 0, 0, 0)
    if LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, 32) != 0:
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount(None, target, flags=MS_BIND | MS_REMOUNT | kept | added)


def new_root(paths: Sequence[tuple[str, str]], disk: int, files: int) -> None:
    """An in-memory root folder of `disk` bytes and `files` files that hides most of the host."""
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes={files + OWN_FILES},mode=755")
    for source, inside in paths:
        if os.path.exists(source):
            bind(source, ROOT + inside)
    os.mkdir(f"{ROOT}/proc")
    # Some containers forbid it; programs work without /proc.
    with contextlib.suppress(OSError):
        mount("proc", f"{ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(ROOT)
    call(LIBC.pivot_root, b".", b".")
    call(LIBC.umount2, b".", MNT_DETACH)
    os.chdir("/")


def switch_user(user: int | None) -> None:
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
