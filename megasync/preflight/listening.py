"""On which interfaces Ray listens when a job spans several machines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from megasync_patches import PatchError, ray_bind

from megasync.config.host import is_loopback, resolve_host
from megasync.preflight.finding import OK, WARNING, Finding

SUBJECT = "ray's interface"


def check_compiler() -> Iterator[Finding]:
    """Whether a launcher could keep Ray to one interface here. Nothing is built."""
    if found := ray_bind.compiler():
        yield Finding(SUBJECT, OK, f"the chosen one, in jobs over several machines, by way of {found}")
    else:
        yield Finding(SUBJECT, OK, "all interfaces, in jobs over several machines: there is no C compiler (cc)")


def check_listening() -> Iterator[Finding]:
    """For a process of a Ray cluster over several machines: where its sockets for all interfaces come to listen."""
    chosen = resolve_host("auto")
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        found = everywhere.getsockname()[0]
    if found != "0.0.0.0" or is_loopback(chosen):
        yield Finding(SUBJECT, OK, f"listens on {chosen}")
        return
    why = "it was not started by megasync's launcher"
    if ray_bind.VARIABLE in os.environ:
        try:
            why = f"{ray_bind.library()} has no effect"
        except PatchError as error:
            why = str(error)
    fix = "install a C compiler (cc) there and launch again, or keep a firewall between the machines and all others"
    yield Finding(SUBJECT, WARNING, f"Ray listens on all interfaces: {why}", fix)
