"""megasync's weight transfer for verl's rollout servers: `checkpoint_engine.backend=megasync`, over gloo or NCCL.

Set `checkpoint_engine.custom_backend_module=megasync.integrations.verl.checkpoint_engine`. No trainer rank gathers
anything: each sends the rectangles that it is the first to hold to all rollout workers at once, in a group of its own, and
every worker puts the tensors together, because verl's servers take them whole. The first trainer rank tells layout and
bucket size; from these both sides make the same plan. A digest follows each part, and it is checked before a tensor of its
bucket is handed out. One deadline holds for a transfer. Whoever fails leaves its groups, which wakes the others; a sender
is done when every worker has said that it has everything.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from megasync.device import resolve_device
from megasync.errors import ConfigError, SyncError
from megasync.integrations.verl.weights import Weights
from megasync.layout.digest import digest, signed
from megasync.layout.shards import describe, layout_of
from megasync.sync.broadcast.plan import BroadcastPlan, plan_broadcast
from megasync.sync.groups import Deadline, SyncGroup, join_store, open_store
from megasync.sync.stream import Shards, empty_part, empty_tensors, pack_part, place_part

# Key of the store under which the first trainer rank tells what the plan is made of.
PLAN = "plan"
# Bytes of a digest, and what a message is padded to a multiple of, so that it can be taken.
WORD = 8


@CheckpointEngineRegistry.register("megasync")
class MegasyncCheckpointEngine(CheckpointEngine):
    """One process's side of a transfer.

    Args:
        bucket_size: bytes of whole tensors that a rollout worker puts together at a time; a larger tensor, with those
            that the servers fuse with it, is a bucket of its own.
        is_master: this is the first trainer rank.
        timeout: seconds for everybody to meet, and for a whole transfer.
        host: address at which others reach this process; None asks Ray.

    Raises:
        ConfigError: a size or a time that is none.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = 600.0, host: str | None = None
    ) -> None:
        section = "actor_rollout_ref.rollout.checkpoint_engine"
        if bucket_size <= 0:
            raise ConfigError(f"{section}.update_weights_bucket_megabytes makes {bucket_size} bytes; raise it")
        if not isinstance(timeout, int | float) or timeout <= 0:
            raise ConfigError(f"{section}.engine_kwargs.megasync.timeout is {timeout!r}; it must be seconds, above 0")
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._timeout = timeout
        self._host = host
        self._store: dist.TCPStore | None = None
        # By trainer rank: rank 0 of a group is that trainer rank, the others are the rollout workers.
        self._groups: dict[int, Group] = {}

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

        def arguments(role: str, count: int) -> dict[str, list[Any]]:
            same = {"role": role, "workers": rollout_world_size, **metadata[0]}
            return {"rank": list(range(count)), **{name: [value] * count for name, value in same.items()}}

        return arguments("trainer", actor_wg_world_size), arguments("rollout", rollout_world_size)

    def init_process_group(self, role: str, rank: int, workers: int, host: str, port: int) -> None:
        """Goes to the meeting point. Raises SyncError when nobody is there in time.

        Args:
            rank: among the trainer ranks, or among the rollout workers.
            workers: how many rollout workers there are.
        """
        self._who, self._rank, self._workers = f"{role} {rank}", rank, workers
        with self._named("the meeting"):
            self._store = self._store or join_store(host, port, self._timeout)

    def finalize(self) -> None:
        """Leaves the groups; may be called more than once."""
        groups, self._groups, self._store = self._groups, {}, None
        for group in groups.values():
            group.close()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Sends this rank's share of the weights.

        Args:
            weights: what megasync's engine gives as `get_per_tensor_param`.

        Raises:
            SyncError: the weights are another engine's, a worker left, or time ran out.
        """
        if not isinstance(weights, Weights):
            raise SyncError(
                f"checkpoint_engine.backend=megasync carries the shards of megasync's engine, and was given a "
                f"{type(weights).__name__}; train with megasync's engine, or choose another backend"
            )
        deadline = Deadline(self._timeout)
        try:
            with weights.held() as shards:
                self._send(shards, deadline, f"step {global_steps}")
        except BaseException:
            self.finalize()
            raise

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, bucket by bucket, on this process's device.

        Raises:
            SyncError: a sender left, time ran out, or a part is not what was sent.
        """
        deadline, step = Deadline(self._timeout), f"step {global_steps}"
        try:
            with self._named(f"the plan of {step}"):
                plan = self._read_plan(deadline)
                self._open(_senders(plan), self._rank + 1)
            for number in range(len(plan.buckets)):
                with self._named(f"bucket {number + 1} of {step}"):
                    found = self._receive(plan, number, deadline)
                for item in found.items():
                    yield item
            with self._named(f"the end of {step}"):
                for group in self._groups.values():
                    group.send(self._word(), 0, deadline)
        except BaseException:
            self.finalize()
            raise

    # The trainer's side

    def _send(self, shards: Shards, deadline: Deadline, step: str) -> None:
        rank, plan = shards.rank, shards.plan(self._bucket_size)
        if self._is_master:
            told = {**describe(shards.layout, shards.dtype), "bucket_bytes": self._bucket_size}
            self._store.set(PLAN, json.dumps(told))
        if rank not in _senders(plan):
            return
        with self._named(f"the meeting for {step}"):
            self._open([rank], 0)
        for number, bucket in enumerate(plan.buckets, 1):
            if rank in bucket.contributions:
                message = _sealed(pack_part(bucket, rank, shards.params))
                with self._named(f"bucket {number} of {step}"):
                    self._groups[rank].broadcast(message, deadline)
        with self._named(f"the end of {step}"):
            for worker in range(self._workers):
                self._groups[rank].receive(self._word(), worker + 1, deadline)

    # The rollout worker's side

    def _read_plan(self, deadline: Deadline) -> BroadcastPlan:
        self._store.wait([PLAN], deadline.left())
        told = json.loads(self._store.get(PLAN))
        layout, dtype = layout_of(told)
        return plan_broadcast(layout, told["bucket_bytes"], dtype)

    def _receive(self, plan: BroadcastPlan, number: int, deadline: Deadline) -> dict[str, torch.Tensor]:
        bucket, device = plan.buckets[number], torch.device(get_device_name())
        whole = empty_tensors(bucket, device)
        for owner in bucket.contributions:
            part = empty_part(bucket, owner, device)
            message = _room(part)
            self._groups[owner].broadcast(message, deadline)
            if signed(digest(message[:-WORD])) != int(message[-WORD:].view(torch.int64)):
                raise SyncError(f"the digest of {part.nbytes} bytes is not that of trainer {owner}")
            place_part(bucket, owner, message[: part.nbytes].view(part.dtype), whole)
        return whole

    # Both sides

    def _open(self, senders: Iterable[int], rank: int) -> None:
        """Enters the group of each sender as ``rank``."""
        backend = resolve_device(get_device_name()).backend
        for sender in senders:
            self._groups[sender] = SyncGroup(
                self._store, f"weights-{sender}", rank, 1 + self._workers, backend, self._timeout, self._timeout
            )

    def _word(self) -> torch.Tensor:
        return torch.zeros(WORD, dtype=torch.uint8, device=get_device_name())

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, SyncError) as error:
            raise SyncError(f"weight transfer, {self._who}: {what} failed: {error}") from error


def _senders(plan: BroadcastPlan) -> list[int]:
    """The trainer ranks that are the first to hold some part of the model."""
    return sorted({rank for bucket in plan.buckets for rank in bucket.contributions})


def _room(part: torch.Tensor) -> torch.Tensor:
    """Room for the bytes of a flat tensor, padded, and their digest."""
    padded = -(-part.nbytes // WORD) * WORD
    return torch.zeros(padded + WORD, dtype=torch.uint8, device=part.device)


def _sealed(part: torch.Tensor) -> torch.Tensor:
    message = _room(part)
    message[: part.nbytes].copy_(part.view(torch.uint8))
    message[-WORD:].view(torch.int64).fill_(signed(digest(message[:-WORD])))
    return message
