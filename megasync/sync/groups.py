"""Process groups of their own, outside the trainer's default world: made, waited on with a deadline, and closed.

Servers join a group by address and name, so both sides must derive the same store keys; `Group` follows what a stock
SGLang server does. Every wait takes the time that is left of one deadline, so a chain of collectives never takes
longer than the operation it belongs to.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from megasync.errors import SyncError

# A backend's own watchdog may end the process, so it has to come after this module's deadline and its clean-up.
WATCHDOG_FACTOR = 4


class Deadline:
    """A point in time that many waits share."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> timedelta:
        """Time that is left.

        Raises:
            SyncError: none is left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise SyncError(f"no time left of {self._seconds:g} s")
        return timedelta(seconds=left)


def open_store(host: str, timeout: float) -> dist.TCPStore:
    """A store that listens on ``host`` only, on a free port (``store.port``)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


class Group:
    """A process group of its own: point-to-point and broadcast with a deadline, and a `close` that others notice.

    Other members notice when the connections go, and gloo closes them with the last reference to the group. So no
    reference leaves this object, not even in the frame of a traceback: each use of `_group` is a temporary.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, backend: str, timeout: float, operation_timeout: float
    ) -> None:
        """Returns once every member is there (gloo), or this one is registered (NCCL, which connects at first use).

        Args:
            timeout: seconds to wait for the other members.
            operation_timeout: the longest that the caller will wait for one operation, in seconds.

        Raises:
            RuntimeError: the others did not come in time.
        """
        self._backend = backend
        store.set_timeout(timedelta(seconds=timeout))
        longest = operation_timeout * WATCHDOG_FACTOR if backend == "nccl" else timeout
        self._group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,
            timeout=timedelta(seconds=longest),
        )
        _world.pg_group_ranks[self._group] = {member: member for member in range(size)}

    def broadcast(self, message: torch.Tensor, deadline: Deadline) -> None:
        """A flat tensor from rank 0 to all others; every member calls it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = deadline.left()
        self._group.broadcast([message], options).wait(deadline.left())

    def send(self, message: torch.Tensor, to: int, deadline: Deadline) -> None:
        self._group.send([message], to, 0).wait(deadline.left())

    def receive(self, message: torch.Tensor, source: int, deadline: Deadline) -> None:
        self._group.recv([message], source, 0).wait(deadline.left())

    def close(self) -> None:
        """Leaves the group; members that wait for this rank are woken."""
        if self._backend == "nccl":
            self._group.abort()
        dist.destroy_process_group(self._group)
        del self._group


class Links:
    """Point-to-point links among the members of one group, with a tag for each message; nothing is registered.

    Made for one transfer or many; after any failed message it is closed and a new one is made.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, backend: str, host: str, timeout: float
    ) -> None:
        """Returns once every member is there (gloo), or this one is registered (NCCL, which connects at first use).

        Args:
            host: this process's address; it listens there and nowhere else.
            timeout: seconds to wait for the other members; the NCCL watchdog's limit is a multiple of it.

        Raises:
            RuntimeError: the others did not come in time.
        """
        self._backend = backend
        store.set_timeout(timedelta(seconds=timeout))
        prefixed = PrefixStore(name, store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout * WATCHDOG_FACTOR)
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=timeout)
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, options)

    def send(self, message: torch.Tensor, to: int, tag: int) -> dist.Work:
        """Starts sending a flat tensor, which must stay as it is until the work is done."""
        return self._group.send([message], to, tag)

    def receive(self, message: torch.Tensor, source: int, tag: int) -> dist.Work:
        return self._group.recv([message], source, tag)

    def close(self) -> None:
        """Leaves; members that wait for this one are woken when the connections go."""
        if self._backend == "nccl":
            self._group.abort()
        del self._group
