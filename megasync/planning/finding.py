"""Findings of checks of the machine, and checks that several doctors share: free space, ports."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megasync.base.files import bytes_text

OK, WARNING, FAILURE = "ok", "warning", "failure"
# Ports that a small run uses: servers, router, metrics, collectives, Ray.
PORTS = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `fix` says what to do; it is empty if `status` is OK."""

    subject: str
    status: str
    detail: str
    fix: str = ""


def verdict(subject: str, passed: bool, detail: str, fix: str, status: str = FAILURE) -> Finding:
    """OK if the check passed, otherwise `status` with the fix."""
    return Finding(subject, OK, detail) if passed else Finding(subject, status, detail, fix)


def check_space(subject: str, path: Path, wanted: int, fix: str, why: str = "") -> Finding:
    """Checks that `wanted` bytes are free on the disk of `path`; `why` is appended to the detail."""
    free = shutil.disk_usage(path).free
    return verdict(subject, free >= wanted, f"{bytes_text(free)} free at {path}{why}", fix)


def check_ports(host: str) -> Iterator[Finding]:
    """Checks that a run finds free ports on an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with ExitStack() as held:
            for _ in range(PORTS):
                held.enter_context(socket.socket(family)).bind((host, 0))
    except OSError as error:
        fix = f"a run needs {PORTS} free ports on this address; check cluster.host, limits and firewall"
        yield Finding("ports", FAILURE, f"{host}: {error}", fix)
    else:
        yield Finding("ports", OK, f"{PORTS} free ports on {host}")
