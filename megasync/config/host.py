"""The address that a process of a run binds to and advertises to other processes, and how others reach it.

Processes of a run reach each other directly, whatever proxy the environment names: a proxy of a company's network knows
none of their addresses. What talks to nothing else starts without the variables (`without_proxies`); user code keeps
them, with the run's own addresses left out (`reach_directly`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any

# Documentation-only address (RFC 5737). Connecting a datagram socket to it selects a route and sends nothing.
ROUTE_PROBE = ("192.0.2.1", 9)
LOOPBACK = "127.0.0.1"
# Environment variable in which a launcher passes the address at which the job's other nodes reach this node.
HOST_VARIABLE = "MEGASYNC_HOST"
# Variables that name a proxy. Programs read them in lower case, in upper case, or both.
PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"})
NO_PROXY_VARIABLES = ("no_proxy", "NO_PROXY")
_LOCAL = ("localhost", LOOPBACK, "::1")


def proxy_variables(env: Mapping[str, str]) -> list[str]:
    """The names of the variables that send a process's requests through a proxy."""
    return sorted(name for name, value in env.items() if value and name.lower() in PROXY_VARIABLES)


def without_proxies(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that reaches other processes of the run only."""
    return {name: value for name, value in env.items() if name.lower() not in PROXY_VARIABLES}


def reach_directly(host: str) -> None:
    """Exempts this machine and a host from the proxies of this process's environment, for it and its children."""
    if not proxy_variables(os.environ):
        return
    listed = [part for name in NO_PROXY_VARIABLES for part in os.environ.get(name, "").split(",")]
    hosts = dict.fromkeys(filter(None, (*map(str.strip, listed), *_LOCAL, host)))
    os.environ.update(dict.fromkeys(NO_PROXY_VARIABLES, ",".join(hosts)))


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
