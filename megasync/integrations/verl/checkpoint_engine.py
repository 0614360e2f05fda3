"""megasync's weight transfer for verl's rollout servers: `checkpoint_engine.backend=megasync`, over gloo or NCCL.

Set `checkpoint_engine.custom_backend_module=megasync.integrations.verl.checkpoint_engine`. No trainer rank gathers
weights. Each trainer rank broadcasts the rectangles that it is the first to hold to all rollout workers, in a process
group of its own, and every worker assembles whole tensors, which verl's servers require. The first trainer rank
publishes layout and bucket size, from which both sides derive the same plan. Each part is followed by its digest, which
is verified before a tensor of its bucket is returned. A transfer has one deadline. A process that fails leaves its
groups, which wakes the others. A sender is done when every worker has confirmed that it has received everything.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractContextManager
from typing import Any

import ray
import torch
from torch._C._distributed_c10d import TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from megasync.base.store import join_store, open_store
from megasync.device import resolve_device
from megasync.errors import ConfigError, SyncError, raised_as
from megasync.integrations.verl.weights import Weights
from megasync.layout.digest import digest, signed
from megasync.layout.shards import describe, layout_of
from megasync.sync.broadcast.plan import BroadcastPlan, plan_broadcast
from megasync.sync.groups import Deadline, SyncGroup
from megasync.sync.stream import Shards, empty_part, empty_tensors, pack_part, place_part

# Store key under which the first trainer rank publishes the inputs of the plan.
PLAN = "plan"
# Bytes of a digest; messages are padded to a multiple of it.
WORD = 8


@CheckpointEngineRegistry.register("megasync")  # pyright: ignore[reportAttributeAccessIssue] - declared untyped
class MegasyncCheckpointEngine(CheckpointEngine):
    """One process's side of a transfer, on a trainer rank or a rollout worker.

    Raises ConfigError if the bucket size or the timeout is not positive.

    Args:
        bucket_size: bytes of whole tensors that a rollout worker assembles at a time. A larger tensor, with those that
            the servers fuse with it, forms its own bucket.
        is_master: whether this is the first trainer rank.
        timeout: seconds for the rendezvous, and for a whole transfer.
        host: address of this process for the others; None asks Ray.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = 600.0, host: str | None = None
    ) -> None:
        section = "actor_rollout_ref.rollout.checkpoint_engine"
        if bucket_size <= 0:
            raise ConfigError(f"{section}.update_weights_bucket_megabytes gives {bucket_size} bytes; increase it")
        if not isinstance(timeout, int | float) or timeout <= 0:
            raise ConfigError(f"{section}.engine_kwargs.megasync.timeout is {timeout!r}; it must be seconds, above 0")
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._timeout = timeout
        self._host = host
        # Opened by `prepare` on the master, joined by `init_process_group` elsewhere.
        self._store: TCPStore | None = None
        # By trainer rank, which is rank 0 of its group; the other ranks are the rollout workers.
        self._groups: dict[int, SyncGroup] = {}

    def prepare(self) -> dict[str, Any]:
        """Opens the rendezvous store on the master and returns its address; {} on other processes."""
        if not self._is_master:
            return {}
        host = self._host or ray.util.get_node_ip_address().strip("[]")
        self._store = open_store(host, self._timeout)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of `init_process_group` for each trainer rank and each rollout worker."""

        def arguments(role: str, count: int) -> dict[str, list[Any]]:
            same = {"role": role, "workers": rollout_world_size, **metadata[0]}
            return {"rank": list(range(count)), **{name: [value] * count for name, value in same.items()}}

        return arguments("trainer", actor_wg_world_size), arguments("rollout", rollout_world_size)

    # verl passes the arguments of `build_topology`.
    def init_process_group(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, role: str, rank: int, workers: int, host: str, port: int
    ) -> None:
        """Joins the rendezvous store. Raises SyncError if it cannot be reached in time.

        Args:
            role: "trainer" or "rollout".
            rank: among the trainer ranks, or among the rollout workers.
            workers: number of rollout workers.
        """
        self._who, self._rank, self._workers = f"{role} {rank}", rank, workers
        with self._step("rendezvous"):
            self._store = self._store or join_store(host, port, self._timeout)

    def finalize(self) -> None:
        """Leaves the groups. May be called more than once."""
        groups, self._groups, self._store = self._groups, {}, None
        for group in groups.values():
            group.close()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Sends this rank's share of the weights.

        ``weights`` come from `get_per_tensor_param` of megasync's engine. Raises SyncError if the weights are from
        another engine, a worker left, or the deadline passed.
        """
        if not isinstance(weights, Weights):
            raise SyncError(
                f"checkpoint_engine.backend=megasync transfers the shards of megasync's engine, but received a "
                f"{type(weights).__name__}; train with megasync's engine, or choose another backend"
            )
        deadline = Deadline(self._timeout)
        try:
            with weights.held() as shards:
                self._send(shards, deadline, f"step {global_steps}")
        except BaseException:
            self.finalize()
            raise

    # verl declares a coroutine but iterates over the result.
    async def receive_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, bucket by bucket, on this process's device.

        Raises SyncError if a sender left, time ran out, or a part is not what was sent.
        """
        deadline, step = Deadline(self._timeout), f"step {global_steps}"
        try:
            with self._step(f"the plan of {step}"):
                plan = self._read_plan(deadline)
                self._open(_senders(plan), self._rank + 1)
            for number in range(len(plan.buckets)):
                with self._step(f"bucket {number + 1} of {step}"):
                    tensors = self._receive(plan, number, deadline)
                for item in tensors.items():
                    yield item
            with self._step(f"confirmation of {step}"):
                for group in self._groups.values():
                    group.send(self._word(), 0, deadline)
        except BaseException:
            self.finalize()
            raise

    # The trainer's side

    def _send(self, shards: Shards, deadline: Deadline, step: str) -> None:
        rank, plan = shards.rank, shards.plan(self._bucket_size)
        if self._is_master:
            inputs = {**describe(shards.layout, shards.dtype), "bucket_bytes": self._bucket_size}
            self._rendezvous.set(PLAN, json.dumps(inputs))
        if rank not in _senders(plan):
            return
        with self._step(f"rendezvous for {step}"):
            self._open([rank], 0)
        for number, bucket in enumerate(plan.buckets, 1):
            if rank in bucket.contributions:
                part = empty_part(bucket, rank, torch.device(get_device_name()))
                pack_part(bucket, shards, part)
                message = _with_digest(part)
                with self._step(f"bucket {number} of {step}"):
                    self._groups[rank].broadcast(message, deadline)
        with self._step(f"confirmation of {step}"):
            for worker in range(self._workers):
                self._groups[rank].receive(self._word(), worker + 1, deadline)

    # The rollout worker's side

    def _read_plan(self, deadline: Deadline) -> BroadcastPlan:
        self._rendezvous.wait([PLAN], deadline.left())
        inputs = json.loads(self._rendezvous.get(PLAN))
        layout, dtype = layout_of(inputs)
        return plan_broadcast(layout, inputs["bucket_bytes"], dtype)

    def _receive(self, plan: BroadcastPlan, number: int, deadline: Deadline) -> dict[str, torch.Tensor]:
        bucket, device = plan.buckets[number], torch.device(get_device_name())
        tensors = empty_tensors(bucket, device)
        for owner in bucket.contributions:
            part = empty_part(bucket, owner, device)
            message = _empty_message(part)
            self._groups[owner].broadcast(message, deadline)
            if signed(digest(message[:-WORD])) != int(message[-WORD:].view(torch.int64)):
                raise SyncError(f"digest mismatch for {part.nbytes} bytes from trainer {owner}")
            place_part(bucket, owner, message[: part.nbytes].view(part.dtype), tensors)
        return tensors

    # Both sides

    def _open(self, senders: Iterable[int], rank: int) -> None:
        """Joins the group of each sender as ``rank``."""
        backend = resolve_device(get_device_name()).backend
        for sender in senders:
            self._groups[sender] = SyncGroup(
                self._rendezvous, f"weights-{sender}", rank, 1 + self._workers, backend, self._timeout, self._timeout
            )

    @property
    def _rendezvous(self) -> TCPStore:
        assert self._store is not None, "verl calls init_process_group first"
        return self._store

    def _word(self) -> torch.Tensor:
        return torch.zeros(WORD, dtype=torch.uint8, device=get_device_name())

    def _step(self, what: str) -> AbstractContextManager[None]:
        failed = f"weight transfer, {self._who}: {what} failed"
        return raised_as(SyncError, failed, of=(RuntimeError, ValueError, SyncError))


def _senders(plan: BroadcastPlan) -> list[int]:
    """The trainer ranks that send some part of the model."""
    return sorted({rank for bucket in plan.buckets for rank in bucket.contributions})


def _empty_message(part: torch.Tensor) -> torch.Tensor:
    """A zeroed message for the padded bytes of a flat tensor and their digest."""
    padded = -(-part.nbytes // WORD) * WORD
    return torch.zeros(padded + WORD, dtype=torch.uint8, device=part.device)


def _with_digest(part: torch.Tensor) -> torch.Tensor:
    message = _empty_message(part)
    message[: part.nbytes].copy_(part.view(torch.uint8))
    message[-WORD:].view(torch.int64).fill_(signed(digest(message[:-WORD])))
    return message
