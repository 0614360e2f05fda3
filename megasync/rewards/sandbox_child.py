"""The process between this package and a sandboxed program: drops privileges, starts the program and supervises it.

Runs as a script; standard library only. It reads one JSON order from its standard input and writes one JSON result,
`{"code", "stdout", "stderr"}`, to its standard output:

    driver -> this (outer) -> first process of new namespaces -> program      with namespaces
    driver -> this                                           -> program      without

With namespaces, the program has a private in-memory root folder (limited in bytes and files; from the host it contains
only the interpreter and shared libraries, read-only), no network, and a private process id space. When the first
process ends, the kernel kills the others. Without namespaces, the program works in `folder`. The kernel re-parents its
orphaned descendants to this process, which kills them. If this process is root, the program gets an unprivileged user
id that no other program has.

An order has `limits`, `namespaces` ("root", "user" or ""), `own_user`, `files` (name to text), `link` (a socket's
descriptor or null), `folder` (without namespaces), and one of `command` (whose {root} is replaced) and `check`, which
this process runs itself against the program at the other end of the link, with the modules of `code` (name to text).
A check is never written to a file.
"""

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import sys
import time
import traceback

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
LIBC = ctypes.CDLL(None, use_errno=True)

# User ids of sandboxes: this plus the process id, so that no two sandboxes share one. No system assigns ids this high.
FIRST_USER = 1_900_000_000
INSIDE_USER = 1000
# Inodes that the root folder needs beyond the program's own files.
OWN_FILES = 128
# Output beyond this is ignored.
OUTPUT_BYTES = 2**20
# The exit status of a check that ran to its end.
PASSED = 42
# Seconds for killing the descendants of a program.
KILL_SECONDS = 5.0
# Mount point of the new root: a folder that every Linux has and no interpreter is installed in.
ROOT = "/sys"


def call(function, *arguments):
    if function(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function.__name__}{arguments}: {os.strerror(error)}")


def mount(source, target, kind=None, flags=0, options=None):
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    call(LIBC.mount, *texts[:3], ctypes.c_ulong(flags), texts[3])


def unshare(kind):
    """Creates namespaces, which the children of this process join."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if kind == "root":
        call(LIBC.unshare, flags)
        return
    user, group = os.geteuid(), os.getegid()
    call(LIBC.unshare, flags | CLONE_NEWUSER)
    # A process that is not dumpable cannot write its own files in /proc.
    LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_USER} {user} 1"),
        ("gid_map", f"{INSIDE_USER} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def visible_paths():
    """Folders and files of the host that a program sees, read-only."""
    prefix = sys.base_prefix
    python = [os.path.join(prefix, name) for name in ("bin", "lib", "lib64")]
    system = ["/bin", "/sbin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return [*system, *python, "/etc/ld.so.cache", *(f"/dev/{name}" for name in ("null", "zero", "random", "urandom"))]


def bind(source, root):
    """Makes a path of the host visible at the same place below a new root."""
    target = root + source
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
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if not source.startswith("/dev/"):
        kept |= MS_RDONLY | MS_NODEV
    mount(None, target, flags=MS_BIND | MS_REMOUNT | MS_NOSUID | kept)


def new_root(limits, file_bytes):
    """An in-memory root folder that hides most of the host and makes the rest read-only."""
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    options = f"size={limits['disk_mb'] * 2**20 + file_bytes},nr_inodes={limits['files'] + OWN_FILES},mode=755"
    mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for source in visible_paths():
        if os.path.exists(source):
            bind(source, ROOT)
    os.mkdir(f"{ROOT}/proc")
    # Some containers forbid it; programs work without /proc.
    with contextlib.suppress(OSError):
        mount("proc", f"{ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{ROOT}/tmp")
    os.chmod(f"{ROOT}/tmp", 0o1777)
    os.chdir(ROOT)
    call(LIBC.pivot_root, b".", b".")
    call(LIBC.umount2, b".", MNT_DETACH)
    os.chdir("/")
    return ""


def limit(order):
    limits, megabyte = order["limits"], 2**20
    resource_limits = [
        (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte, limits["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ]
    # Counted per user id; before Linux 5.14 a user namespace did not separate the counts.
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if order["own_user"] or (order["namespaces"] and release >= (5, 14)):
        resource_limits.append((resource.RLIMIT_NPROC, limits["processes"], limits["processes"]))
    for what, soft, hard in resource_limits:
        allowed = resource.getrlimit(what)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(what, (soft, hard))
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def switch_user(user):
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def execute(order, root, user, started):
    """In the child: becomes the program, or runs the check, and sets the shared byte `started` right before."""
    names = ("stdin", "stdout", "stderr")
    for number, name in enumerate(names):
        os.dup2(os.open(f"{root}/{name}", os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_APPEND), number)
    link = 3
    if order["link"] is not None:
        if order["link"] != link:
            os.dup2(order["link"], link)
        os.set_inheritable(link, True)
    os.closerange(link + (order["link"] is not None), 2**16)
    os.chdir(f"{root}/work")
    switch_user(user)
    limit(order)
    if "check" in order:
        # No process of any user may read the memory of this one.
        LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        *_, check = [loaded(name, text) for name, text in order["code"].items()]
        started[0] = 1
        os._exit(PASSED if check.passes(link, order["check"]) else 1)
    command = [part.replace("{root}", root) for part in order["command"]]
    home = f"{root}/work"
    started[0] = 1
    os.execve(command[0], command, {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8"})


def loaded(name, text):
    sys.modules[name] = module = type(sys)(name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def children():
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


def kill_rest(user):
    """Kills the remaining descendants of the program, until this process has no child."""
    deadline = time.monotonic() + KILL_SECONDS
    if user is not None:
        # All processes of the user at once, so that none escapes by forking.
        if not (killer := os.fork()):
            switch_user(user)
            os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.waitpid(killer, 0)
    while time.monotonic() < deadline:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def status_of(pid):
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def read_output(file):
    return file.read(OUTPUT_BYTES).decode("utf-8", "replace")


def watch(order, root, user, answer):
    """Runs the program to its end and writes the result."""
    for name in ("stdin", "stdout", "stderr"):
        order["files"].setdefault(name, "")
    for name, text in order["files"].items():
        with open(f"{root}/{name}", "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
    os.mkdir(f"{root}/work")
    if user is not None:
        os.chown(f"{root}/work", user, user)
    # Memory that the child shares until it becomes the program.
    started = mmap.mmap(-1, 1)
    # Opened before the program starts, because it could remove them.
    with open(f"{root}/stdout", "rb") as out, open(f"{root}/stderr", "rb") as err, open(answer, "w") as result:
        if not (program := os.fork()):
            try:
                execute(order, root, user, started)
            finally:
                # Reached only after an exception. The traceback goes to the program's own stderr.
                started[0] = 0
                traceback.print_exc()
                os._exit(127)
        code = status_of(program)
        if not started[0]:
            # Not the program's fault: without an answer, it gets no score.
            sys.exit(read_output(err))
        if not order["namespaces"]:
            kill_rest(user)
        json.dump({"code": code, "stdout": read_output(out), "stderr": read_output(err)}, result)


def main():
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    order = json.load(sys.stdin)
    user = FIRST_USER + os.getpid() if order["own_user"] else None
    # The program must never reach this descriptor.
    answer = os.dup(1)
    os.dup2(2, 1)
    if not order["namespaces"]:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # If the driver dies, only this process can kill the program.
        signal.signal(signal.SIGTERM, lambda *_: (kill_rest(user), os._exit(128 + signal.SIGTERM)))
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        watch(order, order["folder"], user, answer)
        return
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    unshare(order["namespaces"])
    if first := os.fork():
        os.close(answer)
        os._exit(status_of(first))
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    watch(order, new_root(order["limits"], sum(map(len, order["files"].values())) * 4), user, answer)


if __name__ == "__main__":
    main()
