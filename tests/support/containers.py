"""An image for tests, of this machine's static busybox, for a program that can start containers of it."""

import asyncio
import atexit
import io
import os
import shutil
import subprocess
import tarfile
from functools import cache

import pytest


def image(program, user=""):
    """The name of the image; one with a user of its own has GNU's tar.

    Skips the test, with the reason, where no container can start.
    """
    made = _image(program, user)
    if " " in made:
        pytest.skip(made)
    return made


async def output(*command):
    """What a command printed."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return (await process.communicate())[0].decode()


@cache
def _image(program, user):
    """The name of the image, or the reason why there is none."""
    busybox = shutil.which("busybox")
    if shutil.which(program) is None or busybox is None:
        return f"the programs {program} and busybox (Debian: busybox-static) are not on the PATH"
    name = f"localhost/megasync-test-{os.getpid()}:{user.partition(':')[0] or 'root'}"
    changes = [word for change in ["WORKDIR /work", f"USER {user}"][: 1 + bool(user)] for word in ("--change", change)]
    made = _ran([program, "import", *changes, "-", name], _root(busybox, gnu=bool(user)))
    if made.returncode != 0:
        return f"{program} makes no image: {made.stderr.decode().strip()}"
    atexit.register(_ran, [program, "rmi", "--force", name])
    # Not by what is tested. The limits must also be there.
    limits = ["--memory", "64m", "--pids-limit", "16", "--ulimit", "nofile=64", "--ulimit", "nproc=1000"]
    groups = "/sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes"
    probe = ["sh", "-c", f'test "$(cat {groups} 2> /dev/null)" -le {64 * 2**20}']
    tried = _ran([program, "run", "--rm", "--network", "none", *limits, name, *probe])
    if tried.returncode != 0:
        return f"{program} starts no container with limits here: {tried.stderr.decode().strip()}"
    return name


def _root(busybox, gnu):
    """The archive of a root folder. With `gnu`, its tar is that of this machine."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for folder in ("bin", "root", "srv", "srv/folder", "srv/other", "tmp"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, {"root": 0o700, "tmp": 0o1777}.get(folder, 0o755)
            tar.addfile(member)
        tar.add(os.path.realpath(busybox), "bin/busybox")
        for applet in subprocess.check_output([busybox, "--list"], text=True).split():
            if applet != "busybox" and not (gnu and applet == "tar"):
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        if gnu:
            program = shutil.which("tar") or "/bin/tar"
            linked = subprocess.check_output(["ldd", program], text=True)
            tar.add(os.path.realpath(program), "bin/tar")
            for library in (word for word in linked.split() if word.startswith("/")):
                tar.add(os.path.realpath(library), library[1:])
        for name in ("srv/folder/of", "srv/other/of"):
            tar.addfile(tarfile.TarInfo(name))
    return target.getvalue()


def _ran(command, content=b""):
    return subprocess.run(command, input=content, capture_output=True, timeout=300, check=False)
