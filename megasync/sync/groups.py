"""Process groups outside the trainer's default world: created, waited on with a deadline, and closed.

Servers join a group by address and name, so both sides must derive the same store keys; `SyncGroup` follows what a
stock SGLang server does. Every wait is limited by what is left of one deadline, so a chain of collectives never takes
longer than the operation that it belongs to.

NCCL differs from gloo in four ways that are handled here. Torch watches NCCL groups and ends the process when a
message fails (`_unwatched`). Making a communicator waits forever for a member that dies meanwhile, so `PeerGroup` waits
for all members first (`_gather`), and makes it in a thread (`_within`). The limit of a wait counts from the start of
the message (`Transfer`). Tags are ignored, and all messages of a group's links form one queue on each member, so all
members must start theirs in an order that agrees.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
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
# Thread blocks that the NCCL links of a group may occupy together. A receive spins on them until its sender comes,
# while the GPU generates.
LINK_BLOCKS = 8
# Messages that may be started ahead of the one that is on the wire. Gloo needs no limit: a message that waits for its
# turn takes nothing. NCCL queues kernels, of which a GPU holds a limited number.
WINDOWS = {"gloo": 2**30, "nccl": 8}


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


def _within(seconds: float, what: str, call: Callable[[], None]) -> None:
    """Calls something that may never return. Raises RuntimeError when it has not returned in time, or its own error."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            outcome.set_exception(error)

    # Left behind when it hangs.
    threading.Thread(target=run, name="megasync-connect", daemon=True).start()
    try:
        outcome.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"{what} took more than {seconds:.1f} s") from None


class PeerGroup:
    """Point-to-point links among the members of one group, with a tag for each message; registers nothing with torch.

    Serves one transfer or many. After a failed message it must be closed and replaced. At most ``window`` messages may
    be started and not waited for, and with ``one_at_a_time`` a sender waits for each before it starts the next one: all
    kernels of a trainer rank go through one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS), where one that waits for
    its link would hold up messages to other engines, until ranks and engines wait for each other in a circle.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        backend: str,
        host: str,
        timeout: float,
        device: torch.device,
    ) -> None:
        """Returns once all members are connected; they communicate from ``device``.

        This process listens on ``host`` only. Raises RuntimeError when another member does not join within ``timeout``
        seconds.
        """
        self.window = WINDOWS[backend]
        self.one_at_a_time = backend == "nccl"
        self._backend = backend
        # Any: torch's stubs lack the methods of both classes.
        self._group: Any
        deadline = Deadline(timeout)
        store.set_timeout(timedelta(seconds=timeout))
        prefixed = PrefixStore(name, store)
        if backend == "nccl":
            _gather(prefixed, rank, size, timeout)
            # Streams of normal priority come from one small pool, and could be the one that the engine computes on.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timedelta(seconds=timeout)
            options.config.max_ctas = LINK_BLOCKS
            with _unwatched():
                group = self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
            # One communicator for all members. Otherwise the first message between two of them makes one for both.
            left = deadline.left().total_seconds()
            _within(left, "making the communicator", lambda: group.eager_connect_single_device(device))
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
