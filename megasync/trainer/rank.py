"""One trainer rank, whole: engine, policy step, checkpoint and its side of the weight sync. Free of Ray.

The constructor opens nothing; `rendezvous` and `start` do. Every method but `pid` and `rendezvous` is a collective: all ranks must be
called with the same arguments, in the same order. Imports of torch and Megatron are inside `start`, so that the class can
be shipped to a process that has not been prepared for them yet (on a CPU, upstream needs patches first).
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.config.host import resolve_host
from megasync.config.schema import Config
from megasync.importing import quick_imports
from megasync.trajectory import Group

if TYPE_CHECKING:
    from torch.distributed import TCPStore

log = logging.getLogger(__name__)


class TrainerRank:
    def __init__(self, config: Config, rank: int, world: int, run_dir: str) -> None:
        self._config = config
        self._rank = rank
        self._world = world
        self._run_dir = Path(run_dir)
        # The process group's, of rank 0.
        self._store: TCPStore | None = None

    def pid(self) -> int:
        """Answers at once unless the rank is at work: a sign of life."""
        return os.getpid()

    def rendezvous(self) -> tuple[str, int] | None:
        """Opens the process group's store on rank 0; where it listens, None on other ranks.

        Left to torch, it would listen on all interfaces.
        """
        if self._rank:
            return None
        from megasync.sync.groups import open_store

        host = resolve_host(self._config.cluster.host)
        self._store = open_store(host, self._config.timeouts.trainer_start)
        return host, self._store.port

    def start(self, host: str, port: int) -> None:
        """Joins the process group, builds the model and loads this rank's slices of the checkpoint folder."""
        from megasync.observe.logfile import log_to_file

        log_to_file(self._run_dir / "logs" / f"trainer-{self._rank}.log")

        config = self._config
        with quick_imports():
            import torch

            from megasync.device import resolve_device

            self._device = resolve_device(config.cluster.device)
            self._device.prepare_process(local_rank=self._rank)
            # Only now: these modules take names from Megatron, which the line above may have bent.
            from megasync.sync.broadcast.plan import plan_broadcast
            from megasync.sync.broadcast.sender import BroadcastSender
            from megasync.sync.disk.writer import DiskWriter
            from megasync.sync.groups import join_store
            from megasync.sync.shard.sender import ShardSender
            from megasync.trainer.engine import MegatronEngine
            from megasync.trainer.policy import PolicyTrainer

        torch.manual_seed(config.seed)
        torch.distributed.init_process_group(
            self._device.backend,
            store=self._store or join_store(host, port, config.timeouts.trainer_start),
            rank=self._rank,
            world_size=self._world,
            timeout=timedelta(seconds=config.timeouts.train_step),
        )
        self._engine = MegatronEngine(
            config.model,
            config.trainer,
            self._device,
            self._rank,
            self._world,
            total_steps=config.schedule.total_steps,
            seed=config.seed,
        )
        self._engine.initialize()
        self._policy = PolicyTrainer(
            self._engine,
            config.algorithm,
            dump_dir=self._run_dir / "skipped",
            temperature=config.rollout.sampling.temperature,
        )
        plan = plan_broadcast(self._engine.layout, config.sync.bucket_mb * 2**20, config.model.dtype)
        part = (
            plan,
            self._engine.layout,
            self._rank,
            self._engine.params(),
            self._device,
            resolve_host(config.cluster.host),
        )
        self._sender = BroadcastSender(*part)
        self._writer = DiskWriter(*part)
        self._shards = ShardSender(
            self._engine.layout,
            self._rank,
            self._engine.params(),
            self._device,
            resolve_host(config.cluster.host),
            config.sync.bucket_mb * 2**20,
            config.model.dtype,
        )
        log.info("rank %d of %d is up, pid %d", self._rank, self._world, os.getpid())

    def step(self, groups: list[Group], step: int, version: int) -> dict[str, float]:
        """One training step; the same metrics on every rank."""
        return self._policy.step(groups, step, version)

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence, under the current weights."""
        return self._engine.logprobs(sequences)

    def save(self, path: str, state: dict[str, Any]) -> None:
        self._engine.save(Path(path), state)

    def load(self, path: str) -> None:
        self._engine.load(Path(path))

    def sync_listen(self, *args: Any) -> Any:
        return self._sender.listen(*args)

    def sync_join(self, *args: Any) -> Any:
        return self._sender.join(*args)

    def sync_send(self, *args: Any) -> Any:
        return self._sender.send(*args)

    def sync_leave(self) -> None:
        self._sender.leave()

    def shard_listen(self, *args: Any) -> Any:
        return self._shards.listen(*args)

    def shard_prepare(self, *args: Any) -> Any:
        return self._shards.prepare(*args)

    def shard_send(self, *args: Any) -> Any:
        return self._shards.send(*args)

    def shard_leave(self) -> None:
        self._shards.leave()

    def disk_listen(self, *args: Any) -> Any:
        return self._writer.listen(*args)

    def disk_join(self, *args: Any) -> Any:
        return self._writer.join(*args)

    def disk_write(self, *args: Any) -> Any:
        return self._writer.write(*args)

    def disk_leave(self) -> None:
        self._writer.leave()

    def stop(self) -> None:
        import torch

        self._sender.leave()
        self._writer.leave()
        self._shards.leave()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
