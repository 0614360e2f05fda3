"""The address that a process of a run binds to and advertises to other processes."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

# Documentation-only address (RFC 5737). Connecting a datagram socket to it selects a route and sends nothing.
ROUTE_PROBE = ("192.0.2.1", 9)
LOOPBACK = "127.0.0.1"
# Environment variable in which a launcher passes the address at which the job's other nodes reach this node.
HOST_VARIABLE = "MEGASYNC_HOST"


def resolve_host(host: str) -> str:
    """The address for this process: `host` itself unless it is "auto".

    For "auto" it is the launcher's address (`HOST_VARIABLE`), else the source address of this node's default route,
    else loopback.
    """
    if host != "auto":
        return host
    # Without a route to the network, other machines cannot reach this one either.
    return os.environ.get(HOST_VARIABLE) or route_from() or LOOPBACK


def route_from(target: Any = ROUTE_PROBE, family: int = socket.AF_INET) -> str | None:
    """The source address of packets to this socket address; None if there is no route. Sends nothing."""
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
    """Whether the address means all interfaces: a process can bind to it, but it tells clients no host."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
