"""Which of a machine's network interfaces leads to the other machines."""

from __future__ import annotations

import socket

import psutil

from megasync.config.host import LOOPBACK, route_from
from megasync.errors import ConfigError


def address_towards(peer: str) -> str:
    """This machine's address on the way to `peer`, a host name or address; of the default route without one.

    Raises ConfigError when the name is unknown here, or no way leads there.
    """
    if not peer:
        return route_from() or LOOPBACK
    try:
        family, _, _, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} does not know the host {peer!r} ({error}); name hosts by addresses"
        ) from error
    found = route_from(target, family)
    if found is None:
        raise ConfigError(f"no network leads from {socket.gethostname()} to {peer!r}; name the interface: --interface")
    return found


def interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == address for found in addresses):
            return name
    raise ConfigError(f"{socket.gethostname()} has no interface with the address {address}")


def address_of(interface: str) -> str:
    """The first address of an interface, IPv4 before IPv6."""
    found = psutil.net_if_addrs()
    if interface not in found:
        raise ConfigError(f"{socket.gethostname()} has no interface {interface!r}; it has {', '.join(sorted(found))}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in found[interface]:
            if one.family == family:
                return one.address.split("%")[0]
    raise ConfigError(f"interface {interface!r} of {socket.gethostname()} has no address")
