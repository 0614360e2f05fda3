"""Examines this machine and its environment before a run: one line per check, and a fix for each failure.

Every check is a function that yields findings and never raises. Nothing is started, changed or downloaded. `run_doctor`
has the checks that depend on a configuration, `cluster_doctor` those across machines.
"""

from __future__ import annotations

import os
import pkgutil
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path

from megasync_patches import PatchError, ray_bind  # pyright: ignore[reportMissingImports] - the folder patches/
from packaging.requirements import Requirement

from megasync.base.files import bytes_text, leaves_room_for_sockets, ray_token_file, socket_folder, writable
from megasync.base.shared_memory import FIX, FOLDER, SHARED_MEMORY_BYTES, free_shared_memory
from megasync.base.shipped import LOCKS
from megasync.config import Config
from megasync.config.host import LOOPBACK, is_loopback, proxy_variables, resolve_host
from megasync.device import why_no_gpu
from megasync.errors import ConfigError
from megasync.install.environment import SUPPORTED as PYTHONS
from megasync.install.pins import applicable, read_pins
from megasync.integrations.verl_versions import SUPPORTED
from megasync.planning.finding import FAILURE, OK, WARNING, Finding, check_ports, check_space, verdict
from megasync.planning.run_doctor import Refuse, examine_for
from megasync.tenants.checks import check_as_run

LOCK = LOCKS / "cpu.lock"
SETUP = "run `megasync install cpu`"
GPU_SETUP = "run `megasync install gpu`"
WITHOUT_TORCH = "not examined, because torch is not installed"
# What the quickstart needs: two servers of 1.6 GB, two trainer ranks, the controller and Ray.
MEMORY_BYTES = 5 * 10**9
DISK_BYTES = 2 * 10**9
# Ray's object store, as `cluster.ray_cluster` sizes it.
OPEN_FILES = 1024
# At most so many wrong packages are named.
NAMED = 8
SERVER_PLUGINS = "sglang.srt.plugins"
RAY_SUBJECT = "ray's interface"
VERL_SUBJECT = "verl plugin"
# Seconds. verl imports torch, Ray, transformers and, on GPUs, Transformer Engine.
VERL_IMPORT_SECONDS = 300
# If verl does not have the engine, importing the plugin again raises the reason.
VERL_PROBE = """
from verl.workers.engine.base import EngineRegistry
try:
    for kind in ("value_model", "language_model"):
        print(EngineRegistry.get_engine_cls(kind, "megasync").__module__)
except AssertionError:
    import megasync.integrations.verl
    raise
"""
# Packages that patches/sglang_cpu_standins replaces if they are missing.
STAND_INS = ("sgl_kernel", "torchvision", "triton")


def _configuration_alone(config: Config) -> tuple[str, ...]:
    """The checks of a node: rows and functions are checked where the driver runs."""
    check_as_run(config)
    return ()


def examine(config: Config | None = None, host: str = LOOPBACK, refuse: Refuse = _configuration_alone) -> list[Finding]:
    """All findings, in the order of `CHECKS`; with a `config` also those of `run_doctor`.

    `host` is the address whose ports are tried if no `config` names one. verl, which takes seconds to import, is
    examined without a `config` only: megasync's own runs do not use it.
    """
    findings = [finding for check in CHECKS for finding in check()]
    return [*findings, *(examine_for(config, refuse) if config else [*check_verl(), *check_ports(host)])]


def check_python() -> Iterator[Finding]:
    """Checks the versions of Python and Linux."""
    detail = f"{sys.version.split()[0]} at {sys.executable}"
    needed = " or ".join(".".join(map(str, numbers)) for numbers in PYTHONS)
    yield verdict("python", sys.version_info[:2] in PYTHONS, detail, f"make an environment with Python {needed}")
    system, fix = os.uname(), "megasync needs Linux 5.3 or newer (pidfd_open)"
    yield verdict("system", hasattr(os, "pidfd_open"), f"{system.sysname} {system.release}", fix)


def check_versions(lock: Path | None = None) -> Iterator[Finding]:
    """Compares installed packages with a lock file, by default that of CPU runs in an environment for them.

    An environment for GPUs, and one without a lock file, is compared with megasync's own requirements; there a
    difference from launch/gpu.lock is only a warning.
    """
    kind = environment_kind()
    if lock is None and kind == "cpu":
        lock = LOCK
    if lock is not None and lock.is_file():
        yield from _against(f"packages ({lock.name})", _pins(lock), SETUP)
        return
    again = "install megasync with its extras again: pip install 'megasync[gpu]'"
    yield from _against("packages", _own_requirements(), again)
    if kind == "cuda" and (tested := LOCKS / "gpu.lock").is_file():
        yield from _against(f"packages ({tested.name})", _pins(tested), GPU_SETUP, WARNING)


def environment_kind() -> str:
    """The kind of this environment: "cuda" with Transformer Engine, which only trainer ranks on GPUs need.

    It may be looked at on a machine without a GPU, such as the driver's.
    """
    from megasync.device import resolve_device

    return "cuda" if find_spec("transformer_engine") else resolve_device("auto").kind


def _pins(lock: Path) -> list[Requirement]:
    """The pins of a lock file that apply to this Python and machine."""
    return [Requirement(pin.requirement) for pin in applicable(read_pins(lock))]


def _own_requirements() -> list[Requirement]:
    """Requirements that megasync declares, including the `gpu` extra."""
    declared = [Requirement(text) for text in requires("megasync") or ()]
    return [r for r in declared if r.marker is None or r.marker.evaluate({"extra": "gpu"})]


def _against(subject: str, wanted: list[Requirement], fix: str, status: str = FAILURE) -> Iterator[Finding]:
    wrong = []
    for requirement in wanted:
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        # A local version tag such as +cpu names the build, not the version.
        if not requirement.specifier.contains(installed.split("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} is {installed}, not {requirement.specifier}")
    named = "; ".join(wrong[:NAMED]) + (f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")
    yield verdict(subject, not wrong, named or f"all {len(wanted)} installed", fix, status)


def check_patches() -> Iterator[Finding]:
    """Reports for each upstream patch whether it is active on this device and fits the installed version."""
    import megasync_patches  # pyright: ignore[reportMissingImports] - the folder patches/

    if find_spec("torch") is None:
        yield Finding("patches", WARNING, WITHOUT_TORCH, SETUP)
        return
    kind = environment_kind()
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
        installed = patch.installed()
        if needed:
            detail = f"active for {patch.package} {installed}: {patch.reason}"
        elif installed:
            detail = f"not needed by {patch.package} {installed}"
        else:
            detail = f"not needed: {patch.package} is not installed"
        yield Finding(subject, OK, detail)
    missing = [name for name in STAND_INS if find_spec(name) is None]
    detail = "not active"
    if kind == "cpu" and missing:
        detail = f"active in CPU servers, which import {', '.join(missing)} without calling them"
    yield Finding("patch sglang_cpu_standins", OK, detail)


def check_devices() -> Iterator[Finding]:
    """Reports cores, GPUs and the free memory of each GPU."""
    cores = len(os.sched_getaffinity(0))
    yield verdict("cpu", cores > 1, f"{cores} core(s)", "at least 2 cores are recommended", WARNING)
    if find_spec("torch") is None:
        yield Finding("gpu", WARNING, WITHOUT_TORCH, f"{SETUP}, or {GPU_SETUP[4:]}")
        return
    import torch

    if not torch.cuda.is_available():
        if environment_kind() == "cpu":
            yield Finding("gpu", OK, "none; runs use cluster.device=cpu")
            return
        why = why_no_gpu() or f"torch {torch.__version__} cannot use it; nvidia-smi may say why"
        fix = "run trainer ranks and servers on machines with GPUs; the driver needs none (cluster.address)"
        yield Finding("gpu", WARNING, f"no GPU: {why}", fix)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        fix = "another process uses it; stop that process, or hide the device with CUDA_VISIBLE_DEVICES"
        yield verdict(f"gpu {index}", free >= 0.9 * total, detail, fix, WARNING)


def check_transformer_engine() -> Iterator[Finding]:
    """Checks Transformer Engine, which trainer ranks on GPUs need; importing it is tried only where there is a GPU."""
    subject = "transformer engine"
    if environment_kind() == "cpu":
        return
    for package in ("transformer_engine", "transformer_engine_torch"):
        try:
            version(package)
        except PackageNotFoundError:
            detail = f"{package.replace('_', '-')} is not installed; trainer ranks on GPUs need it"
            yield Finding(subject, FAILURE, detail, GPU_SETUP)
            return
    if why_no_gpu() is not None:
        yield Finding(subject, OK, f"{version('transformer-engine')}; imported only where there is a GPU")
        return
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001 - a build for another CUDA or torch may raise anything
        fix = "install a build for this torch and CUDA"
        yield Finding(subject, FAILURE, f"{type(error).__name__}: {error}", fix)
    else:
        yield Finding(subject, OK, version("transformer-engine"))


def check_ray() -> Iterator[Finding]:
    """Checks Ray's token authentication: it must be on, and joining a cluster needs its token."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if mode == "disabled":
        detail = "RAY_AUTH_MODE=disabled: anyone who can reach Ray can run code here"
        yield Finding("ray token", WARNING, detail, "unset RAY_AUTH_MODE")
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield Finding("ray token", OK, "from RAY_AUTH_TOKEN")
        return
    path = ray_token_file(os.environ)
    if os.path.isfile(path):
        yield Finding("ray token", OK, str(path))
    elif writable(path.parent):
        yield Finding("ray token", OK, f"will be created at {path}")
    else:
        detail = f"{path} cannot be created; a run that starts Ray itself makes a token of its own"
        yield Finding("ray token", WARNING, detail, "to join a cluster, set RAY_AUTH_TOKEN to its token")


def check_proxies() -> Iterator[Finding]:
    """Reports proxies of the environment, whose addresses may hold a password: only the variables are named."""
    if names := proxy_variables(os.environ):
        detail = f"{', '.join(names)}: for what your code asks; processes of a run reach each other without a proxy"
        yield Finding("proxy", OK, detail)


def check_socket_folder() -> Iterator[Finding]:
    """Checks that there is a folder whose path leaves room for the names of Unix sockets."""
    wanted = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    folder = socket_folder(wanted)
    detail = folder if folder == wanted else f"{folder}, because {wanted} is too long, or cannot be written"
    fix = "set TMPDIR (and RAY_TMPDIR, if it is set) to a shorter path: the path of a Unix socket has at most 107 bytes"
    yield verdict("folder of sockets", leaves_room_for_sockets(folder) and writable(Path(folder)), detail, fix)


def check_memory() -> Iterator[Finding]:
    """Checks free memory, and shared memory for Ray's object store."""
    import psutil

    free = psutil.virtual_memory().available
    fix = f"the quickstart needs about {MEMORY_BYTES / 1e9:.0f} GB; stop other programs"
    yield verdict("memory", free >= MEMORY_BYTES, f"{free / 1e9:.1f} GB available", fix, WARNING)
    try:
        room = free_shared_memory()
    except ConfigError as error:
        yield Finding("shared memory", FAILURE, str(error).removesuffix(f"; {FIX}"), FIX)
    else:
        yield verdict("shared memory", room >= SHARED_MEMORY_BYTES, f"{bytes_text(room)} free at {FOLDER}", FIX)


def check_disk() -> Iterator[Finding]:
    """Checks free disk space, write access, and the limit of open files."""
    here = Path.cwd()
    yield check_space("disk", here, DISK_BYTES, "free some space: checkpoints and logs are written below run_root")
    if not writable(here):
        yield Finding("run folder", FAILURE, f"{here} is not writable", "run from another folder or set run_root")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield verdict("open files", soft >= OPEN_FILES, f"limit {soft}", f"raise it: ulimit -n {min(hard, 65536)}")


def check_plugins() -> Iterator[Finding]:
    """Checks that every SGLang plugin, megasync's and others, can be loaded."""
    registered = False
    for point in entry_points(group=SERVER_PLUGINS):
        package = point.dist.name if point.dist else "?"
        registered |= package == "megasync"
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything at import, and its host would hide it
            fix = SETUP if package == "megasync" else f"repair or remove the package {package}"
            yield Finding(f"plugin {SERVER_PLUGINS}:{point.name}", FAILURE, f"{type(error).__name__}: {error}", fix)
        else:
            yield Finding(f"plugin {SERVER_PLUGINS}:{point.name}", OK, point.value)
    if not registered:
        detail = "megasync's plugin is not registered, so servers can receive weights by broadcast only"
        yield Finding(f"plugin {SERVER_PLUGINS}", FAILURE, detail, SETUP)


def check_compiler() -> Iterator[Finding]:
    """Reports whether a launcher can restrict Ray to one interface here. Nothing is compiled."""
    if compiler := ray_bind.compiler():
        detail = f"in jobs over several machines Ray listens on the chosen interface only (compiler: {compiler})"
    else:
        detail = "in jobs over several machines Ray listens on all interfaces, because there is no C compiler (cc)"
    yield Finding(RAY_SUBJECT, OK, detail)


def check_listening() -> Iterator[Finding]:
    """Checks that a wildcard socket of a process in a multi-node Ray cluster listens on one interface only."""
    chosen = resolve_host("auto")
    with socket.socket() as wildcard:
        wildcard.bind(("", 0))
        bound = wildcard.getsockname()[0]
    if bound != "0.0.0.0" or is_loopback(chosen):
        yield Finding(RAY_SUBJECT, OK, f"listens on {chosen}")
        return
    why = "it was not started by megasync's launcher"
    if ray_bind.VARIABLE in os.environ:
        try:
            why = f"{ray_bind.library()} has no effect"
        except PatchError as error:
            why = str(error)
    fix = "install a C compiler (cc) there and launch again, or put a firewall around the machines"
    yield Finding(RAY_SUBJECT, WARNING, f"Ray listens on all interfaces: {why}", fix)


def check_verl() -> Iterator[Finding]:
    """Checks in a fresh interpreter that verl finds megasync's engine, because verl hides a plugin's error."""
    wanted = " or ".join(SUPPORTED)
    try:
        installed = version("verl")
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
        detail = f"importing verl {installed} took more than {VERL_IMPORT_SECONDS} s"
        yield Finding(VERL_SUBJECT, FAILURE, detail, "import verl in a Python shell to see why")
        return
    if probe.returncode == 0:
        yield Finding(VERL_SUBJECT, OK, f"verl {installed} has the engine of {probe.stdout.split()[-1]}")
        return
    reason = (probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
    fix = f"install verl {wanted} and megasync in one environment, and leave VERL_USE_EXTERNAL_PLUGINS unset"
    yield Finding(VERL_SUBJECT, FAILURE, f"verl {installed} does not have the engine: {reason}", fix)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_versions,
    check_patches,
    check_devices,
    check_transformer_engine,
    check_ray,
    check_proxies,
    check_socket_folder,
    check_compiler,
    check_memory,
    check_disk,
    check_plugins,
)
