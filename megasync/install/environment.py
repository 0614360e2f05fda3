"""Makes an environment from a lock, in two stages.

    outside    `make_environment(names, folder)`: makes the environment, with this installation of megasync in it, and
               becomes `python -m megasync.install` of that environment
    inside     `make_environment(names)`: installs what the locks have and the environment has not

Everything that pip prints goes to install.log in the environment. A step that fails names its cause if it is a known
one. Nothing is asked of git.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.metadata import distribution, version
from pathlib import Path
from typing import NoReturn
from zipfile import ZIP_DEFLATED, ZipFile

from megasync.base.files import atomic_write, writable
from megasync.base.missing import apart_program
from megasync.base.shipped import ROOT, in_checkout
from megasync.errors import ConfigError
from megasync.install.pins import Pin, absent, applicable, canonical, installed_versions, lock_file, read_pins
from megasync.install.steps import LOG, Steps

SUPPORTED = ((3, 11), (3, 12))
# Needed before the lock can be read and megasync be built.
FIRST = ("packaging", "setuptools", "setuptools-scm", "vcs-versioning")
# Locks of whole environments, with the disk space in bytes that one takes: with the CPU build of torch, and whole.
WHOLE = {"cpu": 4 * 10**9, "gpu": 13 * 10**9}
# Unpacked beside Python's path instead of installed: `megasync.lab.rehearsal.packages` reads them there.
UNPACKED = "rehearsal"
# Each has an environment of its own in a folder of the run's: their requirements conflict with those of a run.
APART = ("openenv", "verifiers")
# So many packages are installed by one call of pip; what it has installed stays, whatever happens to the next.
BATCH = 25
# Published without wheels, so they are built here. The last one is built against torch.
BUILT = ("cellpylib", "pycosat", "zss", "transformer-engine-torch")
COMPILERS = {"pycosat": "cc", "transformer-engine-torch": "c++"}
# Transformer Engine would first look for a finished wheel on the network, and prefers another CUDA of the machine.
BUILD_VARIABLES = {
    "NVTE_FRAMEWORK": "pytorch",
    "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
    "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
}
# The version of the project's metadata, and of an environment made from it.
STAMP = ".installed"


def make_environment(names: Sequence[str], folder: Path | None = None) -> bool:
    """Installs what the named locks have, into the environment of this process or, if given, into that of ``folder``.

    With a ``folder`` it does not return: the environment's own Python goes on. Returns whether anything was installed.

    Raises:
        ConfigError: an unknown name, Python or folder, no permission, no space, no compiler. Nothing was changed.
        MegasyncError: a step failed. The same call goes on where it stopped.
    """
    for name in names:
        lock_file(name)
    if len(WHOLE.keys() & set(names)) > 1:
        raise ConfigError("cpu and gpu are two environments; give each a folder of its own: --env DIR")
    _check_python(sys.version_info[:2], f"Python {sys.version.split()[0]} at {sys.executable}")
    if folder is not None:
        _begin(names, folder.absolute())
    _check_current()
    steps = Steps(Path(sys.prefix))
    with steps.alone():
        _ensure_pip(steps)
        for name in [*names, *([UNPACKED] if "gpu" in names else [])]:
            if name == UNPACKED:
                _unpack(steps, read_pins(lock_file(name)))
            elif name in APART:
                _install_apart(steps, name)
            else:
                _install(steps, name)
    return steps.ran


def _check_python(found: tuple[int, ...], named: str) -> None:
    if found[:2] not in SUPPORTED:
        known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise ConfigError(f"{named} is not supported: the packages of a run exist for Python {known}; use one of these")


# Outside: a new environment


def _begin(names: Sequence[str], folder: Path) -> NoReturn:
    """Makes the environment as far as megasync itself, then replaces this process by its Python."""
    python = folder / "bin" / "python"
    steps = Steps(folder)
    if os.path.lexists(python):
        _check_interpreter(python, folder)
    elif folder.exists() and not _is_begun(folder):
        raise ConfigError(f"{folder} exists and is not a virtual environment; choose another folder, or empty this one")
    if "pip" not in _versions(folder):
        _check_room(folder, sum(WHOLE.get(name, 0) for name in names))
        for module in ("venv", "ensurepip"):
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"{sys.executable} cannot create virtual environments with pip (it has no module {module}); "
                    "install your system's package python3-venv"
                )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create {folder}: {error.strerror}; choose another folder with --env") from error
    with steps.alone():
        if "pip" not in _versions(folder):
            steps.say(f"creating {folder} with Python {sys.version.split()[0]} (log: {steps.log})")
            steps.run("virtual environment", [[sys.executable, "-m", "venv", str(folder)]])
        versions = _versions(folder)
        pip = _pip(python)
        if first := absent([pin for pin in read_pins(lock_file("cpu")) if pin.name in FIRST], versions):
            steps.run("build tools", [[*pip, "--no-deps", *(pin.requirement for pin in first)]])
        _install_megasync(steps, pip, folder, versions)
    os.execv(python, [str(python), "-P", "-m", "megasync.install", *names])


def _is_begun(folder: Path) -> bool:
    """Whether a folder is empty, or an environment that was stopped before it had a Python."""
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= {
        LOG,
        "pyvenv.cfg",
        "bin",
        "include",
        "lib",
        "lib64",
    }


def _pip(python: str | Path) -> list[str]:
    """The beginning of a `pip install` command. Without a cache that it can write, pip builds no wheels."""
    variables = os.environ.get("PIP_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = [] if writable(Path(variables).expanduser()) else ["--no-cache-dir"]
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return [str(python), "-m", "pip", "install", *options, *cache]


def _check_interpreter(python: Path, folder: Path) -> None:
    """Refuses an environment whose Python does not start or is not supported."""
    asked = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        raise ConfigError(f"the Python in {folder} does not start; remove that folder and try again") from None
    numbers = tuple(map(int, answer.split()))
    _check_python(numbers, f"the Python {'.'.join(answer.split())} of {folder}")


def _versions(folder: Path) -> dict[str, str]:
    """Packages of an environment that this process does not run in."""
    places = folder.glob("lib/python3.*/site-packages")
    return {name: found for place in places for name, found in installed_versions(place).items()}


def _install_megasync(steps: Steps, pip: list[str], folder: Path, versions: dict[str, str]) -> None:
    """Installs what runs here: a checkout as editable, a wheel as it was installed."""
    stamp = folder / STAMP
    if in_checkout():
        project = (ROOT / "pyproject.toml").read_bytes() + os.fsencode(ROOT)
        wanted = hashlib.sha256(project).hexdigest()
    else:
        wanted = version("megasync")
    if "megasync" in versions and stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == wanted:
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = (
            ["--no-build-isolation", "--editable", str(ROOT)]
            if in_checkout()
            else [str(rebuilt_wheel("megasync", Path(scratch)))]
        )
        steps.run("megasync", [[*pip, "--no-deps", "--force-reinstall", *source]])
    atomic_write(stamp, f"{wanted}\n")


def rebuilt_wheel(name: str, folder: Path) -> Path:
    """The wheel that a package was installed from, put together again in ``folder`` from the files it installed."""
    own = distribution(name)
    # What pip adds. A script in bin/ is made again from the entry points.
    added = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}
    paths = [path for path in own.files or () if path.parts[0] != ".." and "__pycache__" not in path.parts]
    kept = [path for path in paths if not (path.parts[0].endswith(".dist-info") and path.name in added)]
    (record,) = (path for path in paths if path.parts[0].endswith(".dist-info") and path.name == "RECORD")
    wheel = folder / f"{record.parts[0].removesuffix('.dist-info')}-py3-none-any.whl"
    with ZipFile(wheel, "w", ZIP_DEFLATED) as archive:
        for path in kept:
            archive.write(str(own.locate_file(path)), str(path))
        archive.writestr(str(record), "".join(f"{path},,\n" for path in [*kept, record]))
    return wheel


def _check_room(folder: Path, needed: int) -> None:
    place = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"{folder} needs about {needed / 1e9:.0f} GB, and {free / 1e9:.1f} GB are free there; free some space, or "
            "choose a folder on another disk with --env"
        )


# Inside: the packages of a lock


def _check_current() -> None:
    """Refuses an environment that cannot or should not be changed."""
    packages = Path(sysconfig.get_path("purelib"))
    instead = "make a new environment: megasync install cpu --env DIR"
    if sys.prefix == sys.base_prefix and (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists():
        raise ConfigError(
            f"{sys.executable} belongs to the operating system, whose packages pip must not change; {instead}"
        )
    if not os.access(packages, os.W_OK):
        raise ConfigError(f"{packages} cannot be written; {instead}")


def _ensure_pip(steps: Steps) -> None:
    if importlib.util.find_spec("pip") is not None:
        return
    if importlib.util.find_spec("ensurepip") is None:
        raise ConfigError(f"{sys.executable} has no pip; install it, such as by: uv pip install pip")
    steps.run("pip", [[sys.executable, "-m", "ensurepip"]])


def _install(steps: Steps, name: str) -> None:
    """Installs the pins of a lock that the environment does not have."""
    pins = applicable(read_pins(lock_file(name)))
    due = absent(pins, installed_versions())
    if not due:
        return
    _check_room(Path(sys.prefix), WHOLE.get(name, 0) * len(due) // len(pins))
    _check_compilers(due)
    _remove_unfinished(due, Path(sysconfig.get_path("purelib")))
    pip = _pip(sys.executable)
    if name == "cpu" and (torch := [pin for pin in due if pin.name == "torch"]):
        # By its exact pin, with its dependencies: resolved together with others, pip might choose another build of it.
        steps.run(torch[0].requirement, [[*pip, torch[0].requirement]])
        due = absent(pins, installed_versions())
    built = [pin for pin in due if name == "gpu" and pin.name in BUILT]
    wheels = [pin for pin in due if pin not in built]
    hashed = ["--require-hashes", "--no-cache-dir"] if name == "gpu" else []
    with tempfile.TemporaryDirectory() as scratch:
        files = _requirements(wheels, Path(scratch))
        options = [*hashed, "--only-binary", ":all:"] if name == "gpu" else hashed
        title = f"{len(wheels)} packages of {name}.lock"
        if len(pins) > len(due):
            title += f" ({len(pins) - len(due)} are there)"
        steps.run(title, [[*pip, "--no-deps", *options, "--requirement", file] for file in files], count=len(wheels))
        if name == "gpu":
            _complete_toolkit(steps)
        if built:
            (file,) = _requirements(built, Path(scratch))
            command = [*pip, "--no-deps", *hashed, "--no-build-isolation", "--requirement", file]
            names = " ".join(pin.name for pin in built)
            steps.run(f"building {names} (several minutes)", [command], environment=BUILD_VARIABLES)
    importlib.invalidate_caches()


def _install_apart(steps: Steps, name: str) -> None:
    """Makes the environment of a lock that conflicts with a run's, or completes it."""
    folder = Path(sys.prefix) / name
    pins = applicable(read_pins(lock_file(name)))
    if "pip" not in _versions(folder):
        steps.run(f"virtual environment {folder}", [[sys.executable, "-m", "venv", str(folder)]])
    if due := absent(pins, _versions(folder)):
        _remove_unfinished(due, *folder.glob("lib/python3.*/site-packages"))
        with tempfile.TemporaryDirectory() as scratch:
            command = [*_pip(apart_program(name, "python")), "--no-deps", "--requirement"]
            commands = [[*command, file] for file in _requirements(due, Path(scratch))]
            steps.run(f"{len(due)} packages of {name}.lock", commands, count=len(due))


def _requirements(pins: Sequence[Pin], folder: Path) -> list[str]:
    """Files for pip with at most BATCH of the pins each."""
    files = []
    for first in range(0, len(pins), BATCH):
        batch = pins[first : first + BATCH]
        file = folder / f"{batch[0].name}.txt"
        file.write_text("".join(f"{pin.text}\n" for pin in batch), encoding="utf-8")
        files.append(str(file))
    return files


def _check_compilers(due: Sequence[Pin]) -> None:
    """Refuses to begin if a package must be compiled and cannot be."""
    needed = {COMPILERS[pin.name]: pin.name for pin in due if pin.name in COMPILERS}
    headers = Path(sysconfig.get_path("include"))
    for compiler, package in needed.items():
        if shutil.which(compiler) is None:
            fix = "install your system's package build-essential (or g++)"
            raise ConfigError(f"{package} is compiled here, and there is no compiler {compiler}; {fix}")
    if needed and not (headers / "Python.h").is_file():
        raise ConfigError(
            f"{headers} has no Python.h, with which {next(iter(needed.values()))} is compiled; install your system's "
            "package python3-dev"
        )


def _remove_unfinished(due: Sequence[Pin], *folders: Path) -> None:
    """Removes the metadata of packages that pip was stopped in: it would take them for installed."""
    names = {pin.name for pin in due}
    for info in (info for folder in folders for info in folder.glob("*.dist-info")):
        if canonical(info.stem.rpartition("-")[0]) in names and not (info / "INSTALLER").is_file():
            shutil.rmtree(info)


def _complete_toolkit(steps: Steps) -> None:
    """Gives CUDA's folder the names that SGLang compiles against: lib64, libcudart.so and a stub of the driver."""
    for nvcc in Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"):
        cuda = nvcc.parents[1]
        runtimes = [(cuda / "lib" / "libcudart.so", library.name) for library in cuda.glob("lib/libcudart.so.*")]
        for link, target in [(cuda / "lib64", "lib"), *runtimes]:
            if not link.exists():
                link.symlink_to(target)
        # To link against; the driver's own library is loaded at run time.
        (cuda / "lib" / "stubs").mkdir(exist_ok=True)
        stub = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o"]
        steps.run("CUDA's folders as compilers expect them", [[*stub, str(cuda / "lib" / "stubs" / "libcuda.so")]])


def _unpack(steps: Steps, pins: Sequence[Pin]) -> None:
    """Unpacks each package into a folder of its own, from the wheel for the Python of GPU machines.

    They are read, and their compiled parts never loaded.
    """
    for pin in pins:
        folder = Path(sys.prefix) / UNPACKED / f"{pin.name}-{pin.version}"
        if folder.is_dir():
            continue
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        options = ["--python-version", "3.12", "--only-binary", ":all:", "--ignore-requires-python"]
        command = [*_pip(sys.executable), "--no-deps", "--target", str(part), *options, pin.requirement]
        steps.run(f"unpacking {pin.requirement}", [command])
        part.rename(folder)
