"""Links among processes that share their devices: a message is a handle of its memory, which the receiver copies from.

NCCL connects no two processes on one GPU. Here the bytes never leave the node: the sender passes where they are, the
receiver copies them to where they belong and says so. On a GPU the handle is CUDA's, and the copy is one within the
device, or between two of the node. On a CPU the sender first copies the message into memory without a name
(`memfd_create`), which ends with its process.

Handles and receipts travel over gloo, so a member that dies is noticed as there. They are JSON, never pickles.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch

from megasync.concurrency.first_use import prepared
from megasync.device import synchronize
from megasync.errors import raised_as
from megasync.sync.groups import Deadline, PeerGroup, Transfer

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from megasync.device import Device

# The backend of links whose messages are handles.
HANDLES = "handles"
# Bytes of an encoded handle, padded with spaces; CUDA's takes about 400.
HANDLE_BYTES = 1024


@prepared
class HostHandle(msgspec.Struct, frozen=True, tag=True):
    """Anonymous memory of ``nbytes`` bytes: descriptor ``fd`` of process ``pid``.

    Both numbers may soon name something else; ``inode`` tells the memory from what comes after it.
    """

    pid: int
    fd: int
    inode: int
    nbytes: int


@prepared
class CudaHandle(msgspec.Struct, frozen=True, tag=True):
    """``nbytes`` bytes at ``start`` of a storage, which torch opens in another process with what it ``shared``."""

    start: int
    nbytes: int
    shared: tuple[bytes, int, int, bytes, int, bytes, bool]


Handle = HostHandle | CudaHandle


class _HostCopies:
    """Memory for the messages of a sender on a CPU, used again once the receiver has read it.

    `close` gives back all of it, also that of messages which no receiver has read: their links are gone.
    """

    def __init__(self) -> None:
        self._all: list[tuple[int, mmap.mmap]] = []
        self._free: list[tuple[int, mmap.mmap]] = []

    def copy(self, message: torch.Tensor) -> tuple[int, mmap.mmap]:
        """The descriptor and the memory of a copy of a flat tensor."""
        fitting = [copy for copy in self._free if len(copy[1]) >= message.nbytes]
        if fitting:
            copy = min(fitting, key=lambda copy: len(copy[1]))
            self._free.remove(copy)
        else:
            copy = _anonymous_memory(message.nbytes)
            self._all.append(copy)
        torch.frombuffer(copy[1], dtype=torch.uint8)[: message.nbytes].copy_(message.view(torch.uint8))
        return copy

    def reuse(self, copy: tuple[int, mmap.mmap]) -> None:
        if copy in self._all:
            self._free.append(copy)

    def close(self) -> None:
        copies, self._all, self._free = self._all, [], []
        for fd, memory in copies:
            os.close(fd)
            # A thread that fills it holds it until it is done.
            with suppress(BufferError):
                memory.close()


def _anonymous_memory(nbytes: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("megasync")
    try:
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def copy_from(handle: Handle, target: torch.Tensor) -> None:
    """Fills a flat tensor from the memory of another process; returns once it is filled.

    Raises RuntimeError if the memory is gone or has another size.
    """
    if handle.nbytes != target.nbytes:
        raise RuntimeError(f"a message of {handle.nbytes} bytes came where {target.nbytes} were expected")
    if isinstance(handle, HostHandle):
        what = f"the memory of process {handle.pid} cannot be read"
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        with raised_as(RuntimeError, what, of=(OSError, ValueError)), open(path, "rb") as file:
            if os.fstat(file.fileno()).st_ino != handle.inode:
                raise ValueError("the descriptor is of something else")
            # Private: torch takes no memory that cannot be written to.
            memory = mmap.mmap(file.fileno(), handle.nbytes, access=mmap.ACCESS_COPY)
        target.view(torch.uint8).copy_(torch.frombuffer(memory, dtype=torch.uint8))
        return
    target.view(torch.uint8).copy_(_opened(handle, target.device))
    synchronize(target.device)


def _cuda_handle(message: torch.Tensor) -> CudaHandle:
    _, *shared = message.untyped_storage()._share_cuda_()
    start = int(message.storage_offset()) * message.element_size()
    return CudaHandle(start, message.nbytes, tuple(shared))


def _opened(handle: CudaHandle, device: torch.device) -> torch.Tensor:
    """The bytes behind a handle, mapped into this process for as long as the tensor lives."""
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle.shared)
    content = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return content[handle.start : handle.start + handle.nbytes]


class SharedMemoryGroup(PeerGroup):
    """`PeerGroup` whose messages are handles, for members on one node."""

    def __init__(
        self, store: Store, name: str, rank: int, size: int, host: str, timeout: float, device: torch.device
    ) -> None:
        deadline = Deadline(timeout)
        super().__init__(store, name, rank, size, "gloo", host, timeout, device)
        try:
            left = deadline.left().total_seconds()
            self._receipts = PeerGroup(store, f"{name}-receipts", rank, size, "gloo", host, left, device)
        except BaseException:
            super().close()
            raise
        self._copies = _HostCopies()

    def send(self, message: torch.Tensor, to: int, tag: int) -> Transfer:
        synchronize(message.device)
        copy = None
        if message.device.type == "cuda":
            handle: Handle = _cuda_handle(message)
        else:
            copy = self._copies.copy(message)
            handle = HostHandle(os.getpid(), copy[0], os.fstat(copy[0]).st_ino, message.nbytes)
        text = msgspec.json.encode(handle).ljust(HANDLE_BYTES)
        words, receipt = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.zeros(1)
        return _Sent(super().send(words, to, tag), self._receipts.receive(receipt, to, tag), self._copies, copy)

    def receive(self, message: torch.Tensor, source: int, tag: int) -> Transfer:
        words = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
        sent = super().receive(words, source, tag)
        return _Coming(sent, words, message, lambda: self._receipts.send(torch.zeros(1), source, tag))

    def close(self) -> None:
        try:
            super().close()
            self._receipts.close()
        finally:
            self._copies.close()


class _Sent(Transfer):
    """Done once the receiver has read the message."""

    def __init__(
        self, handle: Transfer, receipt: Transfer, copies: _HostCopies, copy: tuple[int, mmap.mmap] | None
    ) -> None:
        self._parts, self._copies, self._copy = (handle, receipt), copies, copy

    def wait(self, limit: timedelta) -> None:
        for part in self._parts:
            part.wait(limit)
        if self._copy is not None:
            self._copies.reuse(self._copy)
            self._copy = None


class _Coming(Transfer):
    """Reads the message when it is waited for."""

    def __init__(
        self, handle: Transfer, words: torch.Tensor, message: torch.Tensor, confirm: Callable[[], Transfer]
    ) -> None:
        self._handle, self._words, self._message, self._confirm = handle, words, message, confirm

    def wait(self, limit: timedelta) -> None:
        self._handle.wait(limit)
        with raised_as(RuntimeError, "what came is not a handle of a message", of=msgspec.MsgspecError):
            handle = msgspec.json.decode(self._words.numpy().tobytes(), type=Handle)
        copy_from(handle, self._message)
        self._confirm().wait(limit)


def link_backend(colocated: bool, device: Device) -> str:
    """The backend that the links of a run use."""
    return HANDLES if colocated else device.backend


def make_links(
    store: Store, name: str, rank: int, size: int, backend: str, host: str, timeout: float, device: torch.device
) -> PeerGroup:
    """Links over a backend: "gloo", "nccl", or `HANDLES`. Raises as `Links` does."""
    if backend == HANDLES:
        return SharedMemoryGroup(store, name, rank, size, host, timeout, device)
    return PeerGroup(store, name, rank, size, backend, host, timeout, device)
