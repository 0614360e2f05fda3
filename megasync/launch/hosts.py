"""The hosts of a job, parsed from the command line or a hosts file."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megasync.config.pools import NODE_POOLS
from megasync.errors import ConfigError, raised_as

# A host name or address with an optional user; an IPv6 address has colons and may have an interface after a %.
NAME = re.compile(r"([\w.+-]+@)?[\w.:%-]+")


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the job."""

    # Passed to the remote shell; may include user@.
    name: str
    # The pool that the host is reserved for; "" for any.
    pool: str = ""
    # Overrides the job's remote shell.
    shell: str = ""
    # How the other hosts reach it, if not by its name.
    address: str = ""

    @property
    def reachable_at(self) -> str:
        """The name or address by which the other hosts reach it."""
        return self.address or self.name.rpartition("@")[2]


def read_hosts(source: str) -> list[Host]:
    """Parses `h1,h2,...`, or a file with one host per line and # comments.

    A host may be reserved for a pool: `h1=trainer` or `h1 trainer`.

    Raises ConfigError for a missing file, an empty list, a duplicate host or an unknown pool.
    """
    if "," not in source and (Path(source).is_file() or "/" in source or source.endswith(".txt")):
        with raised_as(ConfigError, f"the hosts file {source!r} cannot be read", of=(OSError, UnicodeDecodeError)):
            lines = Path(source).read_text(encoding="utf-8-sig").splitlines()
        words = [line.split("#")[0].strip() for line in lines]
    else:
        words = [word.strip() for word in source.split(",")]
    hosts = [_host(word, source) for word in words if word]
    if not hosts:
        raise ConfigError(f"--hosts {source!r} names no host; give h1,h2,... or a file with one host per line")
    counts = Counter(host.reachable_at for host in hosts)
    if duplicates := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"host {duplicates[0]!r} is listed twice in {source!r}; each host runs one Ray node")
    if any(host.pool for host in hosts) and not all(host.pool for host in hosts):
        unassigned = next(host.name for host in hosts if not host.pool)
        raise ConfigError(
            f"host {unassigned!r} has no pool but other hosts do; give every host a pool "
            f"({', '.join(NODE_POOLS)}) or none"
        )
    if hosts[0].pool and {host.pool for host in hosts} != set(NODE_POOLS):
        raise ConfigError(f"every host is in pool {hosts[0].pool!r}; name hosts for each pool: {', '.join(NODE_POOLS)}")
    return hosts


def _host(words: str, source: str) -> Host:
    name, *rest = words.replace("=", " ").split()
    if name.startswith("-") or not NAME.fullmatch(name) or len(rest) > 1:
        raise ConfigError(f"{words!r} in {source!r} is not a host, optionally followed by its pool")
    if rest and rest[0] not in NODE_POOLS:
        raise ConfigError(f"{rest[0]!r} after host {name!r} is not a pool; pools are {', '.join(NODE_POOLS)}")
    return Host(name, *rest)
