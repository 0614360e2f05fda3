"""Keeps Ray 2.60.0 to one interface of a machine. Its head, its nodes, every worker and every driver otherwise listen on all.

Ray has no setting for it: it listens on loopback alone where a node's address is 127.0.0.1, else on the wildcard address.
So `ray_bind.c` is preloaded into Ray and all that runs below it, which sends wildcard binds of TCP sockets to the address
of MEGASYNC_BIND. The C compiler of each machine builds it, once; where there is none the patch cannot be had. What comes
under it too: the stores that PyTorch and SGLang open on all interfaces. What does not: static programs, and those with
more rights than their user. Ray's own processes do without jemalloc, which Ray preloads where nothing else is.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megasync_patches import Patch, PatchError

# The address to listen on.
VARIABLE = "MEGASYNC_BIND"
SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang")
RUN_SECONDS = 60.0
# Where a TCP socket for all interfaces comes to listen.
PROBE = "import socket; all = socket.socket(); all.bind(('', 0)); print(all.getsockname()[0])"


def compiler() -> str | None:
    """The path of this machine's C compiler."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_command(target: Path) -> list[str]:
    return [compiler() or COMPILERS[0], "-shared", "-fPIC", "-O1", "-o", str(target), str(SOURCE), "-ldl"]


def library_name() -> str:
    """Differs with the source, the processor and the C library, as machines may share a folder and nothing else."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    made_from = SOURCE.read_bytes() + f"{platform.machine()} {libc}".encode()
    return f"ray_bind-{hashlib.sha256(made_from).hexdigest()[:16]}.so"


def library() -> Path:
    """The built library: beside the environment, or in the user's cache where that cannot be written.

    Raises:
        PatchError: it is not there and cannot be built.
    """
    folders = (Path(sys.prefix) / "lib", Path.home() / ".cache" / "megasync")
    places = [folder / library_name() for folder in folders]
    for place in places:
        if place.is_file():
            return place
    if compiler() is None:
        raise PatchError(f"no C compiler is there ({', '.join(COMPILERS)}); install one and launch again")
    reasons = []
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _build(place)
        except OSError as error:
            reasons.append(f"{place.parent}: {error}")
        else:
            return place
    raise PatchError(f"{SOURCE.name} cannot be built: {'; '.join(reasons)}")


def _build(target: Path) -> None:
    """Whole or not at all, whoever else builds it at the same time. Raises OSError where the folder cannot be written."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".ray_bind-") as folder:
        made = Path(folder) / target.name
        done = _run(build_command(made))
        if done.returncode:
            raise PatchError(f"the C compiler fails; {' '.join(done.stderr.split())[-300:]}")
        made.replace(target)


def _run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PatchError(f"{command[0]} did not end within {RUN_SECONDS:g} s") from error


def environment(library: Path, address: str) -> dict[str, str]:
    """What a process takes so that it and all below it listen on `address`, beside what is preloaded already.

    Raises:
        PatchError: the dynamic linker cannot be told such a path.
    """
    if any(mark in str(library) for mark in " :"):
        raise PatchError(f"{library} has a space or colon, where LD_PRELOAD would be cut; move the environment")
    there = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    preload = ":".join([*there, *([str(library)] if str(library) not in there else [])])
    # Ray takes LD_PRELOAD from its workers otherwise.
    return {VARIABLE: address, "LD_PRELOAD": preload, "RAY_LD_PRELOAD_ON_WORKERS": "1"}


def apply() -> None:
    """For all processes that this one will start: MEGASYNC_BIND names the address.

    Raises:
        PatchError: it cannot be built, or does nothing here.
    """
    address = os.environ[VARIABLE]
    bound = environment(library(), address)
    done = _run([sys.executable, "-I", "-S", "-c", PROBE], os.environ | bound)
    expected = address if ":" not in address else "127.0.0.1"
    if done.stdout.strip() != expected:
        found = done.stdout.strip() or f"status {done.returncode}"
        raise PatchError(
            f"{bound['LD_PRELOAD']} has no effect ({found} instead of {expected}): {' '.join(done.stderr.split())[-300:]}"
        )
    os.environ |= bound


PATCH = Patch(
    name="ray_bind",
    package="ray",
    versions=("2.60.0",),
    reason="over several machines Ray listens on all interfaces of each; here on the one that was chosen",
    apply=apply,
    kinds=("cpu", "cuda"),
)
