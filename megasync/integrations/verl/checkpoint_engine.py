"""A weight transfer for verl's rollout servers: `checkpoint_engine.backend=megasync`, over gloo or NCCL.

Set `checkpoint_engine.custom_backend_module=megasync.integrations.verl.checkpoint_engine`. The first trainer rank sends
whole tensors, bucket by bucket, to every rollout worker at once; the other trainer ranks only take part in putting the
tensors together. Each bucket is preceded by a table of what is in it, with a digest that the receiver checks before it
hands out a tensor. One deadline holds for a transfer. Whoever fails leaves the group, which wakes the others.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from megasync.device import resolve_device
from megasync.errors import SyncError
from megasync.sync.digest import digest
from megasync.sync.groups import Deadline, Group, join_store, open_store

# Every tensor starts at a multiple of so many bytes, so that it can be viewed in its own dtype.
ALIGNMENT = 16
# Bytes that tell the length of a bucket's table.
PREFIX = 8


@CheckpointEngineRegistry.register("megasync")
class MegasyncCheckpointEngine(CheckpointEngine):
    """One process's side of a transfer; rank 0 sends, rank -1 only keeps step, all others receive.

    Args:
        bucket_size: bytes of a bucket; a larger tensor is a bucket of its own.
        is_master: this is the first trainer rank.
        timeout: seconds for everybody to meet, and for a whole transfer.
        host: address at which others reach this process; None asks Ray.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = 600.0, host: str | None = None
    ) -> None:
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._timeout = timeout
        self._host = host
        self._rank: int | None = None
        self._store: dist.TCPStore | None = None
        self._group: Group | None = None

    def prepare(self) -> dict[str, Any]:
        """Opens the meeting point on the master; where it is."""
        if not self._is_master:
            return {}
        host = self._host or ray.util.get_node_ip_address().strip("[]")
        self._store = open_store(host, self._timeout)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`, for each trainer rank and each rollout worker."""

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            same = {"size": 1 + rollout_world_size, "host": metadata[0]["host"], "port": metadata[0]["port"]}
            return {"rank": ranks, **{name: [value] * count for name, value in same.items()}}

        trainers = [0] + [-1] * (actor_wg_world_size - 1)
        return arguments(trainers), arguments(list(range(1, 1 + rollout_world_size)))

    def init_process_group(self, rank: int, size: int, host: str, port: int) -> None:
        """Meets the others. Raises SyncError when they do not come in time."""
        self._rank = rank
        if rank < 0:
            return
        device = resolve_device(get_device_name())
        with self._named("the meeting"):
            self._store = self._store or join_store(host, port, self._timeout)
            self._group = Group(self._store, "weights", rank, size, device.backend, self._timeout, self._timeout)

    def finalize(self) -> None:
        """Leaves the group; may be called more than once."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Sends every tensor; ranks below 0 take theirs, because making a tensor needs all trainer ranks.

        Raises:
            SyncError: a receiver left, or time ran out; whatever making a tensor raises is raised as it is.
        """
        if self._rank < 0:
            for _ in weights:
                pass
            return
        deadline = Deadline(self._timeout)
        try:
            for number, bucket in enumerate(_buckets(weights, self._bucket_size), 1):
                with self._named(f"bucket {number} of step {global_steps}"):
                    self._send(bucket, deadline)
            with self._named(f"the end of step {global_steps}"):
                self._send([], deadline)
        except BaseException:
            self.finalize()
            raise

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Names and tensors in the order in which they were sent, each a part of its bucket's memory.

        Raises:
            SyncError: the sender left, time ran out, or a bucket is not what was sent.
        """
        deadline, number, more = Deadline(self._timeout), 0, True
        try:
            while more:
                number += 1
                with self._named(f"bucket {number} of step {global_steps}"):
                    found = self._receive(deadline)
                more = bool(found)
                for item in found:
                    yield item
        except BaseException:
            self.finalize()
            raise

    def _send(self, bucket: list[tuple[str, torch.Tensor]], deadline: Deadline) -> None:
        payload, table = _pack(bucket)
        text = json.dumps(table).encode()
        head = torch.tensor([len(text)], dtype=torch.int64).view(torch.uint8)
        for message in (head, torch.frombuffer(bytearray(text), dtype=torch.uint8), payload):
            if message.numel():
                self._group.broadcast(message.to(get_device_name()), deadline)

    def _receive(self, deadline: Deadline) -> list[tuple[str, torch.Tensor]]:
        head = self._take(PREFIX, deadline).cpu()
        table = json.loads(bytes(self._take(int(head.view(torch.int64)), deadline).tolist()))
        if not table["tensors"]:
            return []
        payload = self._take(table["nbytes"], deadline)
        if digest(payload) != table["digest"]:
            raise SyncError(f"the digest of {table['nbytes']} bytes is not the sender's")
        return list(_unpack(payload, table))

    def _take(self, nbytes: int, deadline: Deadline) -> torch.Tensor:
        message = torch.empty(nbytes, dtype=torch.uint8, device=get_device_name())
        self._group.broadcast(message, deadline)
        return message

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, SyncError) as error:
            raise SyncError(f"weight transfer, rank {self._rank}: {what} failed: {error}") from error


def _buckets(weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket, size = [], 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _pack(bucket: list[tuple[str, torch.Tensor]]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tensors behind each other as bytes, and the table by which `_unpack` finds them again."""
    tensors, end = [], 0
    for name, tensor in bucket:
        tensors.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    payload = torch.zeros(end, dtype=torch.uint8, device=bucket[0][1].device if bucket else "cpu")
    for (_, tensor), (*_, start) in zip(bucket, tensors, strict=True):
        payload[start : start + tensor.nbytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    return payload, {"tensors": tensors, "nbytes": end, "digest": digest(payload) if end else 0}


def _unpack(payload: torch.Tensor, table: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, kind, shape, start in table["tensors"]:
        dtype = getattr(torch, kind)
        yield name, payload[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
