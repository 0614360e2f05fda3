"""Which address a process of a run binds to and is reached at."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

# Documentation-only address (RFC 5737): connecting a datagram socket to it picks the route but sends nothing.
ROUTE_PROBE = ("192.0.2.1", 9)
LOOPBACK = "127.0.0.1"
# The address of this node that the job's other nodes reach it at, where a launcher has found out.
HOST_VARIABLE = "MEGASYNC_HOST"


def resolve_host(host: str) -> str:
    """The address for this process: `host` itself, or for "auto" what the launcher found, else the one that this node's
    default route leaves from."""
    if host != "auto":
        return host
    # Without a route out of this machine nobody else could reach it either.
    return os.environ.get(HOST_VARIABLE) or route_from() or LOOPBACK


def route_from(target: Any = ROUTE_PROBE, family: int = socket.AF_INET) -> str | None:
    """The address from which packets to this socket address leave; None when there is no route. Sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError:
            return None
        return probe.getsockname()[0]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether it stands for every interface, so that a process binds to all of them and nobody is told where it is."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
