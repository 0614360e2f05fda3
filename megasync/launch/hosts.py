"""The machines of a job, as a person or a scheduler names them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megasync.cluster.marks import POOLS
from megasync.errors import ConfigError

# A host name or address, perhaps with a user before it; an IPv6 address has colons, perhaps an interface behind a %.
NAME = re.compile(r"([\w.+-]+@)?[\w.:%-]+")


@dataclass(frozen=True, slots=True)
class Host:
    """`name` is what the remote shell calls it, with a user@ before it or without; `pool` is what runs there, "" for anything.

    `shell` is the remote shell that leads there, where it is not the job's; `address` is what the other hosts call it,
    where that is not its name.
    """

    name: str
    pool: str = ""
    shell: str = ""
    address: str = ""

    @property
    def called(self) -> str:
        return self.address or self.name.rpartition("@")[2]


def read_hosts(source: str) -> list[Host]:
    """From `h1,h2,...` or a file with one host a line; behind a host may stand the pool that it is for, `h1=trainer`
    or `h1 trainer`. Lines that begin with # say nothing.

    Raises ConfigError for a missing file, no host, a host named twice, and an unknown pool.
    """
    if "," not in source and (Path(source).is_file() or "/" in source or source.endswith(".txt")):
        try:
            lines = Path(source).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the hosts' file {source!r} cannot be read: {error}") from error
        words = [line.split("#")[0].strip() for line in lines]
    else:
        words = [word.strip() for word in source.split(",")]
    hosts = [_host(word, source) for word in words if word]
    if not hosts:
        raise ConfigError(f"--hosts {source!r} names no host; write h1,h2,... or a file with one host a line")
    if twice := [name for name, times in Counter(host.called for host in hosts).items() if times > 1]:
        raise ConfigError(f"host {twice[0]!r} is named twice in {source!r}; every machine has one Ray node")
    if any(host.pool for host in hosts) and not all(host.pool for host in hosts):
        bare = next(host.name for host in hosts if not host.pool)
        raise ConfigError(f"host {bare!r} has no pool, others have; give every host one ({', '.join(POOLS)}) or none")
    if hosts[0].pool and {host.pool for host in hosts} != set(POOLS):
        raise ConfigError(f"all hosts are for {hosts[0].pool!r}; name hosts for each pool: {', '.join(POOLS)}")
    return hosts


def _host(words: str, source: str) -> Host:
    name, *rest = words.replace("=", " ").split()
    if name.startswith("-") or not NAME.fullmatch(name) or len(rest) > 1:
        raise ConfigError(f"{words!r} in {source!r} is not a host, nor a host and its pool")
    if rest and rest[0] not in POOLS:
        raise ConfigError(f"{rest[0]!r} behind host {name!r} is not a pool; pools are {', '.join(POOLS)}")
    return Host(name, *rest)
