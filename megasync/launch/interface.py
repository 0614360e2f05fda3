"""Selects the network interface of a host that routes to the other hosts of a job."""

from __future__ import annotations

import socket

import psutil

from megasync.config.host import LOOPBACK, route_from
from megasync.errors import ConfigError


def address_towards(peer: str) -> str:
    """This host's IPv4 address on the route to `peer` (a host name or address), or on the default route if it is "".

    Raises ConfigError if the name does not resolve or there is no route.
    """
    if not peer:
        return route_from() or LOOPBACK
    here = socket.gethostname()
    try:
        found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"{here} cannot resolve the host {peer!r} ({error}); list hosts by address") from error
    targets = [target for family, _, _, _, target in found if family == socket.AF_INET]
    if not targets:
        raise ConfigError(f"{here} resolves {peer!r} to IPv6 only ({found[0][4][0]}); list hosts by IPv4 address")
    address = route_from(targets[0])
    if address is None:
        raise ConfigError(f"{here} has no route to {peer!r}; choose the interface with --interface")
    return address


def interface_of(address: str) -> str:
    """The name of the interface that has this address. Raises ConfigError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == address for found in addresses):
            return name
    raise ConfigError(f"{socket.gethostname()} has no interface with the address {address}")


def address_of(interface: str) -> str:
    """The first IPv4 address of an interface. Raises ConfigError if there is none."""
    found = psutil.net_if_addrs()
    if interface not in found:
        raise ConfigError(f"{socket.gethostname()} has no interface {interface!r}; it has {', '.join(sorted(found))}")
    for entry in found[interface]:
        if entry.family == socket.AF_INET:
            return entry.address
    raise ConfigError(f"interface {interface!r} of {socket.gethostname()} has no IPv4 address")
