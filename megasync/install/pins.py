"""The locks that come with megasync, and which of their pins an environment has."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megasync.base.shipped import LOCKS
from megasync.errors import ConfigError


@dataclass(frozen=True)
class Pin:
    """One entry of a lock: a package with its exact version and, in gpu.lock, a marker and hashes."""

    name: str
    version: str
    # The entry as pip reads it, without the hashes.
    requirement: str
    # The same with the hashes, over several lines.
    text: str


def canonical(name: str) -> str:
    """A package's name as PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_names() -> list[str]:
    """The names of the locks: the arguments of `megasync install`."""
    return sorted(path.stem for path in LOCKS.glob("*.lock"))


def lock_file(name: str) -> Path:
    """The file of a lock. Raises ConfigError with the list of locks if there is none of this name."""
    if name not in lock_names():
        raise ConfigError(f"{name!r} cannot be installed; name one of: {' '.join(lock_names())}")
    return LOCKS / f"{name}.lock"


def read_pins(lock: Path) -> list[Pin]:
    """All pins of a lock file, also those whose marker excludes this machine."""
    entries: list[list[str]] = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            entries[-1].append(line)
        elif line and not line.startswith("#"):
            entries.append([line])
    pins = []
    for lines in entries:
        requirement = lines[0].removesuffix("\\").strip()
        name, _, version = requirement.partition(";")[0].strip().partition("==")
        pins.append(Pin(canonical(name), version, requirement, "\n".join(lines)))
    return pins


def applicable(pins: Iterable[Pin]) -> list[Pin]:
    """The pins whose marker this machine and this Python fulfil."""
    from packaging.requirements import Requirement

    markers = ((pin, Requirement(pin.requirement).marker) for pin in pins)
    return [pin for pin, marker in markers if marker is None or marker.evaluate()]


def installed_versions(folder: Path | None = None) -> dict[str, str]:
    """The packages of an environment by canonical name, without a version's build tag such as +cpu.

    A package that pip has not finished writing is left out: it has no INSTALLER file yet.
    """
    folders = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")} if folder is None else {folder}
    found: dict[str, str] = {}
    for place in folders:
        for info in place.glob("*.dist-info"):
            if (info / "INSTALLER").is_file():
                name, _, version = info.stem.rpartition("-")
                found[canonical(name)] = version.partition("+")[0]
    return found


def absent(pins: Iterable[Pin], versions: Mapping[str, str]) -> list[Pin]:
    """The pins that are not installed in exactly this version."""
    return [pin for pin in pins if versions.get(pin.name) != pin.version]
