"""Which of a machine's network interfaces leads to the other machines."""

from __future__ import annotations

import socket

import psutil

from megasync.config.host import LOOPBACK, route_from
from megasync.errors import ConfigError


def address_towards(peer: str) -> str:
    """This machine's IPv4 address on the way to `peer`, a host name or address; of the default route without one.

    Raises ConfigError when the name is unknown here, or no way leads there.
    """
    if not peer:
        return route_from() or LOOPBACK
    here = socket.gethostname()
    try:
        found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(f"{here} does not know the host {peer!r} ({error}); name hosts by addresses") from error
    targets = [target for family, _, _, _, target in found if family == socket.AF_INET]
    if not targets:
        raise ConfigError(f"{here} knows {peer!r} by IPv6 only ({found[0][4][0]}); name hosts by IPv4 addresses")
    address = route_from(targets[0])
    if address is None:
        raise ConfigError(f"no network leads from {here} to {peer!r}; name the interface: --interface")
    return address


def interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == address for found in addresses):
            return name
    raise ConfigError(f"{socket.gethostname()} has no interface with the address {address}")


def address_of(interface: str) -> str:
    """The first IPv4 address of an interface."""
    found = psutil.net_if_addrs()
    if interface not in found:
        raise ConfigError(f"{socket.gethostname()} has no interface {interface!r}; it has {', '.join(sorted(found))}")
    for one in found[interface]:
        if one.family == socket.AF_INET:
            return one.address
    raise ConfigError(f"interface {interface!r} of {socket.gethostname()} has no IPv4 address")
