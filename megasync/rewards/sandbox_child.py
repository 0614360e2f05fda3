"""What runs between this package and a sandboxed program: takes rights away from itself, then becomes the program.

Started as a script, with limits and command as JSON in the first argument; standard library only. Where the kernel lets
an ordinary user make namespaces, the program has no network and no sight of other processes' ids, and whatever it starts
ends with it. `--probe` prints whether that is so.
"""

import ctypes
import json
import os
import resource
import sys

CLONE_NEWPID, CLONE_NEWUSER, CLONE_NEWNET = 0x20000000, 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SIGKILL = 9
LIBC = ctypes.CDLL(None, use_errno=True)


def isolate():
    """Whether children of this process now get no network, and process ids of their own."""
    return LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID) == 0


def follow(pid):
    """Waits for a child and ends as it ended: its exit status, or 128 + the signal that killed it."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def limit(limits):
    megabyte = 2**20
    for what, soft, hard in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * megabyte, limits["file_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def main():
    if sys.argv[1] == "--probe":
        print(json.dumps(isolate()))
        return
    order = json.loads(sys.argv[1])
    # Should the process that started this one die, nobody would be left to keep the deadline.
    LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if isolate():
        if first := os.fork():
            follow(first)
        # The first process of the new namespace: the kernel ends all others with it.
        LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if program := os.fork():
            follow(program)
    limit(order["limits"])
    os.execv(order["command"][0], order["command"])


if __name__ == "__main__":
    main()
