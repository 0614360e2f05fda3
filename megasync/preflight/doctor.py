"""Examines this machine and environment before a run does: one line per check, and for each failure what to do.

Every check is a function that yields findings and never raises; nothing is started, changed or downloaded. `run_doctor` has
those that depend on a configuration, `cluster_doctor` those of several machines together.
"""

from __future__ import annotations

import os
import pkgutil
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path

from megasync_patches import PatchError, ray_bind
from packaging.requirements import Requirement

from megasync.config import Config
from megasync.config.host import LOOPBACK, is_loopback, resolve_host
from megasync.integrations.verl_versions import SUPPORTED
from megasync.preflight.finding import FAILURE, OK, WARNING, Finding, check_ports, check_space, writable
from megasync.preflight.run_doctor import examine_for

LOCK = Path(__file__).resolve().parents[2] / "launch" / "cpu.lock"
SETUP = "run `bash launch/setup.sh`"
OLDEST_PYTHON = (3, 11)
# What the quickstart takes: two servers of 1.6 GB, two trainer ranks, the controller and Ray.
MEMORY_BYTES = 5 * 10**9
DISK_BYTES = 2 * 10**9
# Ray's object store, as `cluster.ray_cluster` asks for it.
SHARED_MEMORY_BYTES = 512 * 2**20
OPEN_FILES = 1024
SERVER_PLUGINS = "sglang.srt.plugins"
RAY_SUBJECT = "ray's interface"
VERL_SUBJECT = "verl plugin"
# Seconds; verl imports torch, Ray, transformers and, on GPUs, Transformer Engine.
VERL_IMPORT_SECONDS = 300
# If verl does not know the engine, importing the plugin again says why.
VERL_PROBE = """
from verl.workers.engine.base import EngineRegistry
try:
    for kind in ("value_model", "language_model"):
        print(EngineRegistry.get_engine_cls(kind, "megasync").__module__)
except AssertionError:
    import megasync.integrations.verl
    raise
"""
# Packages that patches/sglang_cpu_standins stands in for where they are missing.
STAND_INS = ("sgl_kernel", "torchvision", "triton")


def examine(config: Config | None = None, host: str = LOOPBACK) -> list[Finding]:
    """All findings, in the order of `CHECKS`; with a `config` also what that one needs here. `host` is the address whose
    ports are tried when no `config` names one.
    """
    found = [finding for check in CHECKS for finding in check()]
    return [*found, *(check_ports(host) if config is None else examine_for(config))]


def check_python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("python", FAILURE, found, f"needs {'.'.join(map(str, OLDEST_PYTHON))} or newer; {SETUP}")
    else:
        yield Finding("python", OK, f"{found} at {sys.executable}")
    if hasattr(os, "pidfd_open"):
        yield Finding("system", OK, f"{os.uname().sysname} {os.uname().release}")
    else:
        yield Finding("system", FAILURE, os.uname().sysname, "megasync needs Linux 5.3 or newer (pidfd_open)")


def check_versions(lock: Path | None = None) -> Iterator[Finding]:
    """Installed packages against the lock file, by default that of CPU runs on a CPU machine; where there is none,
    against megasync's own requirements.
    """
    from megasync.device import resolve_device

    if lock is None and resolve_device("auto").kind == "cpu":
        lock = LOCK
    if lock is not None and lock.is_file():
        yield from _against(f"packages ({lock.name})", _read_lock(lock), SETUP)
    else:
        yield from _against(
            "packages", _own_requirements(), "install megasync with its extras again: pip install 'megasync[gpu]'"
        )


def _read_lock(lock: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def _own_requirements() -> list[Requirement]:
    """What megasync declares, the `gpu` extra included."""
    found = [Requirement(text) for text in requires("megasync") or ()]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": "gpu"})]


def _against(subject: str, wanted: list[Requirement], fix: str) -> Iterator[Finding]:
    wrong = []
    for requirement in wanted:
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        # A build tag such as +cpu says how a version was built, not which one it is.
        if not requirement.specifier.contains(found.split("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    if wrong:
        yield Finding(subject, FAILURE, "; ".join(wrong), fix)
    else:
        yield Finding(subject, OK, f"all {len(wanted)} are there")


def check_patches() -> Iterator[Finding]:
    """Each upstream deviation: whether it is active on this machine's device, and fits the installed version."""
    import megasync_patches

    from megasync.device import resolve_device

    kind = resolve_device("auto").kind
    for module in pkgutil.iter_modules(megasync_patches.__path__):
        patch = getattr(import_module(f"megasync_patches.{module.name}"), "PATCH", None)
        if patch is None:
            continue
        subject = f"patch {patch.name}"
        if kind not in patch.kinds:
            yield Finding(subject, OK, f"not active: for {' and '.join(patch.kinds)} only")
            continue
        try:
            needed = patch.needed()
        except megasync_patches.PatchError as error:
            yield Finding(subject, FAILURE, str(error), f"{SETUP}, or install {patch.package} {patch.versions[-1]}")
            continue
        found = patch.installed()
        if needed:
            detail = f"active for {patch.package} {found}: {patch.reason}"
        elif found:
            detail = f"not needed by {patch.package} {found}"
        else:
            detail = f"not needed: {patch.package} is not installed"
        yield Finding(subject, OK, detail)
    absent = [name for name in STAND_INS if find_spec(name) is None]
    active = kind == "cpu" and absent
    detail = (
        f"active in CPU servers, which import {', '.join(absent)} and call nothing in them" if active else "not active"
    )
    yield Finding("patch sglang_cpu_standins", OK, detail)


def check_devices() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0))
    yield Finding("cpu", OK if cores > 1 else WARNING, f"{cores} core(s)", "" if cores > 1 else "a run wants 2 or more")
    if not torch.cuda.is_available():
        yield Finding("gpu", OK, "none; runs take cluster.device=cpu")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        yield Finding(
            f"gpu {index}",
            WARNING if busy else OK,
            f"{torch.cuda.get_device_name(index)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free",
            "another process uses it; end that one, or hide the device with CUDA_VISIBLE_DEVICES" if busy else "",
        )


def check_transformer_engine() -> Iterator[Finding]:
    """Whether the layers that trainer ranks take on GPUs can be loaded; nothing on a CPU, where they are not used."""
    from megasync.device import resolve_device

    subject = "transformer engine"
    if resolve_device("auto").kind == "cpu":
        return
    if find_spec("transformer_engine") is None:
        fix = "pip install 'megasync[gpu]'"
        yield Finding(subject, FAILURE, "not installed; trainer ranks take its layers on GPUs and have no others", fix)
        return
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001 - a build for another CUDA or torch may raise anything
        fix = "install a build for this torch and CUDA"
        yield Finding(subject, FAILURE, f"{type(error).__name__}: {error}", fix)
    else:
        yield Finding(subject, OK, version("transformer-engine"))


def check_ray() -> Iterator[Finding]:
    """Ray's token authentication: a token must be there, or makeable, and it must not be turned off."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "disabled":
        yield Finding(
            "ray token",
            WARNING,
            "RAY_AUTH_MODE=disabled: anyone who reaches Ray may run code here",
            "unset RAY_AUTH_MODE",
        )
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield Finding("ray token", OK, "from RAY_AUTH_TOKEN")
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.is_file():
        yield Finding("ray token", OK, str(path))
    elif writable(path.parent):
        yield Finding("ray token", OK, f"will be made at {path}")
    else:
        yield Finding(
            "ray token", FAILURE, f"{path} cannot be made", "make its folder writable, or set RAY_AUTH_TOKEN yourself"
        )


def check_memory() -> Iterator[Finding]:
    import psutil

    free = psutil.virtual_memory().available
    enough = free >= MEMORY_BYTES
    yield Finding(
        "memory",
        OK if enough else WARNING,
        f"{free / 1e9:.1f} GB available",
        "" if enough else f"the quickstart takes about {MEMORY_BYTES / 1e9:.0f} GB; end other programs",
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        yield check_space(
            "shared memory", shared, SHARED_MEMORY_BYTES, "enlarge /dev/shm (in a container: --shm-size=1g)"
        )


def check_disk() -> Iterator[Finding]:
    here = Path.cwd()
    yield check_space("disk", here, DISK_BYTES, "free some space: checkpoints and logs go under run_root")
    if not writable(here):
        yield Finding("run folder", FAILURE, f"{here} is not writable", "run from another folder or set run_root")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        yield Finding("open files", FAILURE, f"limit {soft}", f"raise it: ulimit -n {min(hard, 65536)}")
    else:
        yield Finding("open files", OK, f"limit {soft}")


def check_plugins() -> Iterator[Finding]:
    """Entry points by which SGLang would load code of megasync's and of others, and whether each can be loaded."""
    own = []
    for point in entry_points(group=SERVER_PLUGINS):
        mine = point.dist is not None and point.dist.name == "megasync"
        own += [point] if mine else []
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything at import, and its host would hide it
            fix = SETUP if mine else f"repair or remove the package {point.dist.name if point.dist else '?'}"
            yield Finding(f"plugin {SERVER_PLUGINS}:{point.name}", FAILURE, f"{type(error).__name__}: {error}", fix)
        else:
            yield Finding(f"plugin {SERVER_PLUGINS}:{point.name}", OK, point.value)
    if not own:
        found = "megasync's is not registered here, so servers take weights by broadcast only"
        yield Finding(f"plugin {SERVER_PLUGINS}", FAILURE, found, SETUP)


def check_compiler() -> Iterator[Finding]:
    """Whether a launcher could keep Ray to one interface here. Nothing is built."""
    if found := ray_bind.compiler():
        yield Finding(RAY_SUBJECT, OK, f"the chosen one, in jobs over several machines, by way of {found}")
    else:
        yield Finding(RAY_SUBJECT, OK, "all interfaces, in jobs over several machines: there is no C compiler (cc)")


def check_listening() -> Iterator[Finding]:
    """For a process of a Ray cluster over several machines: where its sockets for all interfaces come to listen."""
    chosen = resolve_host("auto")
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        found = everywhere.getsockname()[0]
    if found != "0.0.0.0" or is_loopback(chosen):
        yield Finding(RAY_SUBJECT, OK, f"listens on {chosen}")
        return
    why = "it was not started by megasync's launcher"
    if ray_bind.VARIABLE in os.environ:
        try:
            why = f"{ray_bind.library()} has no effect"
        except PatchError as error:
            why = str(error)
    fix = "install a C compiler (cc) there and launch again, or keep a firewall between the machines and all others"
    yield Finding(RAY_SUBJECT, WARNING, f"Ray listens on all interfaces: {why}", fix)


def check_verl() -> Iterator[Finding]:
    wanted = " or ".join(SUPPORTED)
    try:
        found = version("verl")
    except PackageNotFoundError:
        yield Finding(VERL_SUBJECT, OK, f"verl is not installed; the plugin is for verl {wanted}")
        return
    try:
        probe = subprocess.run(
            [sys.executable, "-c", VERL_PROBE],
            env={**os.environ, "VERL_ENGINE_DEVICE": "cuda"},
            check=False,
            capture_output=True,
            text=True,
            timeout=VERL_IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            VERL_SUBJECT,
            FAILURE,
            f"importing verl {found} took more than {VERL_IMPORT_SECONDS} s",
            "import verl by hand",
        )
        return
    if probe.returncode == 0:
        yield Finding(VERL_SUBJECT, OK, f"verl {found} has the engine of {probe.stdout.split()[-1]}")
        return
    reason = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
    fix = f"install verl {wanted} and megasync in one environment, and leave VERL_USE_EXTERNAL_PLUGINS unset"
    yield Finding(VERL_SUBJECT, FAILURE, f"verl {found} does not have the engine: {reason}", fix)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_versions,
    check_patches,
    check_devices,
    check_transformer_engine,
    check_ray,
    check_compiler,
    check_memory,
    check_disk,
    check_plugins,
    check_verl,
)
