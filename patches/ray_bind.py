"""Makes Ray 2.60.0 listen on one network interface. Its nodes, workers and drivers otherwise listen on all of them.

Ray has no setting for this: it listens on loopback if the address of a node is 127.0.0.1, otherwise on the wildcard
address. So `ray_bind.c` is preloaded into Ray and all its child processes; it redirects wildcard binds of TCP sockets
to the address in MEGASYNC_BIND. Each host compiles the library once, with its own C compiler; without a compiler the
patch is not available. The library also applies to the stores that PyTorch and SGLang open on all interfaces, but not
to statically linked or setuid programs. Ray's own processes run without jemalloc, which Ray preloads only if nothing
else is preloaded.
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
# Prints the address that a TCP socket for all interfaces is bound to.
PROBE = "import socket; all = socket.socket(); all.bind(('', 0)); print(all.getsockname()[0])"


def compiler() -> str | None:
    """The path of this host's C compiler; None if there is none."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def build_command(target: Path) -> list[str]:
    """The command that compiles the library."""
    return [compiler() or COMPILERS[0], "-shared", "-fPIC", "-O1", "-o", str(target), str(SOURCE), "-ldl"]


def library_name() -> str:
    """The file name. It depends on source, processor and C library, because different hosts may share the folder."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    made_from = SOURCE.read_bytes() + f"{platform.machine()} {libc}".encode()
    return f"ray_bind-{hashlib.sha256(made_from).hexdigest()[:16]}.so"


def library() -> Path:
    """The path of the library, which is built if necessary in the environment, or else in the user's cache.

    Raises:
        PatchError: the library cannot be built.
    """
    folders = (Path(sys.prefix) / "lib", Path.home() / ".cache" / "megasync")
    places = [folder / library_name() for folder in folders]
    for place in places:
        if place.is_file():
            return place
    if compiler() is None:
        raise PatchError(f"no C compiler found ({', '.join(COMPILERS)}); install one and launch again")
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
    """Builds the library atomically; concurrent builds are safe. Raises OSError if the folder is not writable."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".ray_bind-") as folder:
        made = Path(folder) / target.name
        done = _run(build_command(made))
        if done.returncode:
            raise PatchError(f"the C compiler failed: {' '.join(done.stderr.split())[-300:]}")
        made.replace(target)


def _run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PatchError(f"{command[0]} did not finish within {RUN_SECONDS:g} s") from error


def environment(library: Path, address: str) -> dict[str, str]:
    """The environment that makes a process and its children listen on `address`. Keeps other preloaded libraries.

    Raises:
        PatchError: the path of the library cannot be used in LD_PRELOAD.
    """
    if any(mark in str(library) for mark in " :"):
        raise PatchError(f"{library} has a space or colon, which LD_PRELOAD does not support; move the environment")
    there = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    preload = ":".join([*there, *([str(library)] if str(library) not in there else [])])
    # Otherwise Ray removes LD_PRELOAD from its workers.
    return {VARIABLE: address, "LD_PRELOAD": preload, "RAY_LD_PRELOAD_ON_WORKERS": "1"}


def apply() -> None:
    """Applies the patch to all processes that this one will start. MEGASYNC_BIND must contain the address.

    Raises:
        PatchError: the library cannot be built, or has no effect.
    """
    address = os.environ[VARIABLE]
    bound = environment(library(), address)
    done = _run([sys.executable, "-I", "-S", "-c", PROBE], os.environ | bound)
    expected = address if ":" not in address else "127.0.0.1"
    if done.stdout.strip() != expected:
        found = done.stdout.strip() or f"status {done.returncode}"
        raise PatchError(
            f"{bound['LD_PRELOAD']} has no effect ({found} instead of {expected}): "
            f"{' '.join(done.stderr.split())[-300:]}"
        )
    os.environ |= bound


PATCH = Patch(
    name="ray_bind",
    package="ray",
    versions=("2.60.0",),
    reason="on several hosts Ray listens on all interfaces; the patch limits it to the chosen one",
    apply=apply,
    kinds=("cpu", "cuda"),
)
