"""Process groups outside the trainer's default world: created, waited on with a deadline, and closed.

Servers join a group by address and name, so both sides must derive the same store keys; `SyncGroup` follows what a
stock SGLang server does. Every wait is limited by what is left of one deadline, so a chain of collectives never takes
longer than the operation that it belongs to.

NCCL differs from gloo in four ways that are handled here. Torch watches NCCL groups and ends the process when a
message fails (`_unwatched`). Creating a group does not wait for its members, and the first message waits forever
(`_gather`). The limit of a wait counts from the start of the message (`Transfer`). Tags are ignored, so both ends of a
link must start its messages, in both directions, in the same order.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    Store,
    _new_process_group_helper,
    _world,
)

from megasync.errors import SyncError

# With it torch creates NCCL groups without the thread that watches their messages.
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# Thread blocks that one NCCL link may occupy. A receive spins on them until its sender comes, while the GPU generates.
LINK_BLOCKS = 4


class Deadline:
    """A point in time that limits many waits."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> timedelta:
        """The time left. Raises SyncError when the deadline has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise SyncError(f"no time left of {self._seconds:g} s")
        return timedelta(seconds=left)


def open_store(host: str, timeout: float) -> TCPStore:
    """A store that listens only on ``host``, on a free port (``store.port``)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """A client of the store that listens there; ``timeout`` is in seconds."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


@contextmanager
def _unwatched() -> Iterator[None]:
    """NCCL groups created inside are not watched: only the wait for a failed message raises.

    Otherwise a thread of torch finds the failure too and ends the process: a server because a trainer rank was lost, or
    a rank because a server was lost.
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


def _gather(store: Store, rank: int, size: int, timeout: float) -> None:
    """Returns once every member has called it. Raises RuntimeError when one has not within ``timeout`` seconds."""
    store.set(f"here-{rank}", "1")
    store.wait([f"here-{member}" for member in range(size)], timedelta(seconds=timeout))


class SyncGroup:
    """A process group with point-to-point and broadcast under a deadline, and a `close` that other members notice.

    Other members notice when the connections close, and gloo closes them with the last reference to the group. So no
    reference leaves this object, not even in the frame of a traceback: each use of `_group` is a temporary.
    """

    def __init__(
        self, store: Store, name: str, rank: int, size: int, backend: str, timeout: float, operation_timeout: float
    ) -> None:
        """Returns once every member has joined (gloo), or this one is registered (NCCL, which connects at first use).

        Raises RuntimeError when another member does not join within ``timeout`` seconds. No operation takes longer than
        ``operation_timeout`` seconds.
        """
        self._backend = backend
        store.set_timeout(timedelta(seconds=timeout))
        longest = operation_timeout if backend == "nccl" else timeout
        # Any: torch's stubs know neither what the helper returns for a member nor the group's methods.
        self._group: Any
        with _unwatched():
            self._group, _ = _new_process_group_helper(
                size,
                rank,
                [],
                Backend(backend),
                PrefixStore(name, store),
                group_name=GroupName(name),
                timeout=timedelta(seconds=longest),
            )
        _world.pg_group_ranks[self._group] = {member: member for member in range(size)}

    def broadcast(self, message: torch.Tensor, deadline: Deadline) -> None:
        """Sends a flat tensor from rank 0 to all others; every member calls it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = deadline.left()
        self._group.broadcast([message], options).wait(deadline.left())

    def send(self, message: torch.Tensor, to: int, deadline: Deadline) -> None:
        """Sends a flat tensor to one member; returns once it has left."""
        self._group.send([message], to, 0).wait(deadline.left())

    def receive(self, message: torch.Tensor, source: int, deadline: Deadline) -> None:
        """Fills a flat tensor from one member."""
        self._group.recv([message], source, 0).wait(deadline.left())

    def close(self) -> None:
        """Leaves the group; members that wait for this rank get an error."""
        if self._backend == "nccl":
            self._group.abort()
        dist.destroy_process_group(self._group)
        del self._group


class Transfer:
    """A message in flight. Its tensor may be reused only after `wait`."""

    def __init__(self, work: dist.Work, backend: str) -> None:
        self._work = work
        self._started = time.monotonic() if backend == "nccl" else None

    def wait(self, limit: timedelta) -> None:
        """Returns once the message has left or arrived. Raises RuntimeError if it has not within ``limit`` from now."""
        if self._started is not None:
            limit += timedelta(seconds=time.monotonic() - self._started)
        self._work.wait(limit)


class Links:
    """Point-to-point links among the members of one group, with a tag for each message; registers nothing with torch.

    Serves one transfer or many. After a failed message it must be closed and replaced.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, backend: str, host: str, timeout: float) -> None:
        """Returns once every member has joined; NCCL connects two of them with the first message between them.

        This process listens on ``host`` only. Raises RuntimeError when another member does not join within ``timeout``
        seconds.
        """
        self._backend = backend
        # Any: torch's stubs lack the methods of both classes.
        self._group: Any
        store.set_timeout(timedelta(seconds=timeout))
        prefixed = PrefixStore(name, store)
        if backend == "nccl":
            _gather(prefixed, rank, size, timeout)
            # Streams of normal priority come from one small pool, and could be the one that the engine computes on.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timedelta(seconds=timeout)
            options.config.max_ctas = LINK_BLOCKS
            with _unwatched():
                self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            options = cast(Any, dist.ProcessGroupGloo)._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=timeout)
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, options)

    def send(self, message: torch.Tensor, to: int, tag: int) -> Transfer:
        """Starts sending a flat tensor, which must not change until the transfer is done."""
        return Transfer(self._group.send([message], to, tag), self._backend)

    def receive(self, message: torch.Tensor, source: int, tag: int) -> Transfer:
        """Starts receiving into a flat tensor."""
        return Transfer(self._group.recv([message], source, tag), self._backend)

    def close(self) -> None:
        """Leaves and closes the connections; members that wait for this one get an error."""
        if self._backend == "nccl":
            self._group.abort()
        del self._group
