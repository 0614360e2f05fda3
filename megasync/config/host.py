"""Which address a process of a run binds to and is reached at."""

from __future__ import annotations

import ipaddress
import socket

# Documentation-only address (RFC 5737): connecting a datagram socket to it picks the route but sends nothing.
ROUTE_PROBE = ("192.0.2.1", 9)
LOOPBACK = "127.0.0.1"


def resolve_host(host: str) -> str:
    """The address for this process: `host` itself, or for "auto" the one this node's default route leaves from."""
    if host != "auto":
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ROUTE_PROBE)
        except OSError:  # no route out of this machine, so nobody else could reach it either
            return LOOPBACK
        return probe.getsockname()[0]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
