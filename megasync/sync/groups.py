"""Process groups of their own, outside the trainer's default world: made, waited on with a deadline, and closed.

Servers join a group by address and name, so both sides must derive the same store keys; `Group` follows what a stock
SGLang server does. Every wait takes the time that is left of one deadline, so a chain of collectives never takes
longer than the operation it belongs to.

NCCL differs from gloo in four ways that are met here: torch watches over its groups and ends the process when a message
fails (`_unwatched`); making a group waits for nobody, and the first message for ever (`_gather`); a wait's limit counts
from when the message was started (`Transfer`); and tags are ignored, so both ends of a link must start its messages, in
both directions, in the same order.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from megasync.errors import SyncError

# With it torch makes NCCL groups without the thread that watches over their messages.
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# Thread blocks that one NCCL link may occupy: a receive spins on them until its sender comes, and generation goes on beside.
LINK_BLOCKS = 4


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


@contextmanager
def _unwatched() -> Iterator[None]:
    """NCCL groups made within it are not watched: only the wait for a failed message raises.

    Otherwise a thread of torch's finds the failure, too, and ends the process: a server for a lost trainer rank, and a
    rank for a lost server.
    """
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def _gather(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Returns once every member has come here. Raises RuntimeError when one has not within ``timeout`` seconds."""
    store.set(f"here-{rank}", "1")
    store.wait([f"here-{member}" for member in range(size)], timedelta(seconds=timeout))


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
        longest = operation_timeout if backend == "nccl" else timeout
        with _unwatched():
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


class Transfer:
    """A message under way; its tensor is used again only after `wait`."""

    def __init__(self, work: dist.Work, backend: str) -> None:
        self._work = work
        self._started = time.monotonic() if backend == "nccl" else None

    def wait(self, limit: timedelta) -> None:
        """Returns once the message has left, or is there. Raises RuntimeError if it is not after ``limit`` from now."""
        if self._started is not None:
            limit += timedelta(seconds=time.monotonic() - self._started)
        self._work.wait(limit)


class Links:
    """Point-to-point links among the members of one group, with a tag for each message; nothing is registered.

    Made for one transfer or many; after any failed message it is closed and a new one is made.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, backend: str, host: str, timeout: float
    ) -> None:
        """Returns once every member is there; NCCL connects two of them with the first message between them.

        Args:
            host: this process's address; it listens there and nowhere else.
            timeout: seconds to wait for the other members.

        Raises:
            RuntimeError: the others did not come in time.
        """
        self._backend = backend
        store.set_timeout(timedelta(seconds=timeout))
        prefixed = PrefixStore(name, store)
        if backend == "nccl":
            _gather(prefixed, rank, size, timeout)
            # Streams of usual priority come from one small pool, and may be the one that the engine computes on.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timedelta(seconds=timeout)
            options.config.max_ctas = LINK_BLOCKS
            with _unwatched():
                self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=timeout)
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, options)

    def send(self, message: torch.Tensor, to: int, tag: int) -> Transfer:
        """Starts sending a flat tensor, which must stay as it is until the transfer is done."""
        return Transfer(self._group.send([message], to, tag), self._backend)

    def receive(self, message: torch.Tensor, source: int, tag: int) -> Transfer:
        return Transfer(self._group.recv([message], source, tag), self._backend)

    def close(self) -> None:
        """Leaves; members that wait for this one are woken when the connections go."""
        if self._backend == "nccl":
            self._group.abort()
        del self._group
