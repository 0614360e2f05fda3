"""A complete trainer rank: learner, policy step, checkpoints and the trainer's side of the weight sync. Ray-free.

The constructor opens nothing; `rendezvous` and `start` do. Every method except `pid` and `rendezvous` is a collective:
call it on all ranks with the same arguments, in the same order. torch and Megatron are imported in `start`, so that the
class can be sent to a process that is not prepared for them yet (on a CPU, upstream needs patches first).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from megasync.base.importing import quick_imports
from megasync.buffer.payload import LeasedGroup
from megasync.buffer.segments import load_trajectories
from megasync.config.host import resolve_host
from megasync.config.schema import Config
from megasync.observe import trace
from megasync.observe.clock import Reading, read_clock
from megasync.observe.rollouts import RolloutLog, rollout_bytes
from megasync.sync.weight_sync import SendingRank
from megasync.trainer.user_buffers import close_buffers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from megasync.sync.broadcast.sender import BroadcastSender
    from megasync.sync.disk.writer import DiskWriter
    from megasync.sync.shard.sender import ShardSender
    from megasync.trainer.critic import Critic
    from megasync.trainer.quantized import QuantizedWeights

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)


# The sender of each prefix of the methods of `SendingRank`.
_SENDERS = {"sync": "_broadcast", "shard": "_shard", "disk": "_disk"}


def _of_sender(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[TrainerRank, P], R]:
    """Implements a method of `SendingRank`: ``sync_x`` calls x of the sender of broadcasts.

    Senders send present weights.
    """
    prefix, _, name = method.__name__.partition("_")

    def call(rank: TrainerRank, *arguments: P.args, **options: P.kwargs) -> R:
        if name in ("send", "write") and rank._quantized is not None:
            with trace.span("rank", "quantize"):
                rank._quantized.refresh()
        with trace.span("rank", name):
            return getattr(getattr(rank, _SENDERS[prefix]), name)(*arguments, **options)

    return call


class TrainerRank:
    """One rank of the trainer, the target of the calls of `cluster.trainer_group`."""

    def __init__(self, config: Config, rank: int, world: int, run_dir: str) -> None:
        self._config = config
        self._rank = rank
        self._world = world
        self._run_dir = Path(run_dir)
        self._bucket_bytes = config.sync.bucket_mb * 2**20
        self._critic: Critic | None = None
        # What servers get of quantized weights, if they keep them so.
        self._quantized: QuantizedWeights | None = None
        # The store of the process group, on rank 0.
        self._store: TCPStore | None = None

    def pid(self) -> int:
        """The process id; answers immediately unless the rank is busy, so it serves as a liveness check."""
        return os.getpid()

    def clock(self) -> Reading:
        """This host, and the time on its clock."""
        return read_clock()

    def rendezvous(self) -> tuple[str, int] | None:
        """Opens the store of the process group on rank 0 and returns its address; None on other ranks.

        If torch opened it, it would listen on all interfaces.
        """
        if self._rank:
            return None
        from megasync.base.store import open_store

        self._store = open_store(self._host, self._config.timeouts.trainer_start)
        return self._host, self._store.port

    @cached_property
    def _host(self) -> str:
        return resolve_host(self._config.cluster.host)

    def start(self, host: str, port: int, clock_offsets: Mapping[str, float] | None = None) -> str:
        """Joins the process group, builds the model and loads this rank's shard of the model folder.

        ``clock_offsets`` are those of other hosts than the driver's; see `observe.clock`. Returns the device's name.
        """
        from megasync.observe import stacks
        from megasync.observe.logfile import log_to_file

        log_to_file(self._run_dir / "logs" / f"trainer-{self._rank}.log")
        stacks.answer()

        config = self._config
        offset = (clock_offsets or {}).get(read_clock().host, 0.0)
        limit = trace.share_bytes(config.observe, self._world)
        trace.start(self._run_dir / trace.TRACE_FOLDER, f"trainer-{self._rank}", limit, offset)
        with quick_imports():
            import torch

            from megasync.device import resolve_device

            self._device = resolve_device(config.cluster.device)
            self._device.prepare_process(local_rank=self._rank)
            # Imported after `prepare_process`, which may patch Megatron.
            from megasync.base.store import join_store
            from megasync.layout.shards import served_in_fp8
            from megasync.sync.stream import Shards
            from megasync.trainer.critic import Critic, critic_learner
            from megasync.trainer.flops import peak_tflops
            from megasync.trainer.learner import MegatronLearner
            from megasync.trainer.offload import Offload
            from megasync.trainer.policy import PolicyTrainer
            from megasync.trainer.quantized import QuantizedWeights
            from megasync.trainer.recording import Recorder

        # Entries of NCCL's flight recorder, which hang reports show.
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
        torch.manual_seed(config.seed)
        # Later than the deadline by which the driver notices a hung rank: its peers would seem to have failed.
        collective_seconds = 2 * config.timeouts.train_step
        torch.distributed.init_process_group(
            self._device.backend,
            store=self._store or join_store(host, port, config.timeouts.trainer_start),
            rank=self._rank,
            world_size=self._world,
            # The first collectives are the ranks' meeting, which may take as long as their start.
            timeout=timedelta(seconds=max(collective_seconds, config.timeouts.trainer_start)),
        )
        of_run: dict[str, Any] = {
            "seed": config.seed,
            "collective_seconds": collective_seconds,
        }
        steps = config.schedule.total_steps
        # The policy's schedule begins when it does.
        own_steps = steps - config.critic.warmup_steps
        self._learner = MegatronLearner(
            config.model, config.trainer, self._device, self._rank, total_steps=own_steps, **of_run
        )
        self._learner.initialize()
        self._offload = Offload(self._learner.memory, self._device)
        if config.critic.enabled:
            learner = critic_learner(
                config.critic, config.model, config.trainer, self._device, self._rank, total_steps=steps, **of_run
            )
            learner.initialize()
            self._critic = Critic(learner, config.critic)
        recorder = None
        if most := config.observe.rollouts:
            share = rollout_bytes(config.observe.rollouts_mb, config.trainer.data_parallel)
            recorder = Recorder(RolloutLog(self._run_dir, f"trainer-{self._rank}", share), most, self._learner)
        self._policy = PolicyTrainer(
            self._learner,
            config.algorithm,
            dump_dir=self._run_dir / "skipped",
            temperature=config.rollout.sampling.temperature,
            longest=config.rollout.sampling.max_new_tokens,
            critic=self._critic,
            teachers=bool(config.teachers),
            recorder=recorder,
            norms_every=config.observe.norms_every,
            peak_tflops=config.observe.peak_tflops or peak_tflops(self._device.name),
        )
        # Merged adapters take memory, so they exist only for servers that get them.
        alone = config.sync.transport == "adapters"
        layout, params = (
            (self._learner.trained_layout, self._learner.trained)
            if alone
            else (self._learner.layout, self._learner.params())
        )
        if config.rollout.fp8:
            layout = served_in_fp8(layout, Path(config.model.path))
            self._quantized = QuantizedWeights(layout, self._rank, params)
            params = self._quantized.params()
        self._shards = Shards(layout, config.model.dtype, self._rank, params)
        log.info("Trainer rank %d of %d is ready, pid %d", self._rank, self._world, os.getpid())
        return self._device.name

    def visible_devices(self) -> str:
        """The GPUs assigned to this process, in the format of CUDA_VISIBLE_DEVICES; empty for all, or on a CPU."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def offload(self) -> None:
        """Moves the optimizer's state to the host and drops gradients. Scoring and weight syncs still work."""
        from megasync.trainer.offload import GRADIENTS, OPTIMIZER

        self._offload.offload(GRADIENTS, OPTIMIZER)
        if self._critic is not None:
            self._critic.leave_device()

    def restore(self) -> None:
        """Undoes `offload`, which training and checkpoints need; has no effect where nothing is offloaded."""
        from megasync.trainer.offload import GRADIENTS, OPTIMIZER

        self._offload.restore(GRADIENTS, OPTIMIZER)
        if self._critic is not None:
            self._critic.return_to_device()

    def step(self, groups: list[LeasedGroup], step: int, version: int) -> dict[str, float]:
        """Runs one training step; returns the same metrics on every rank."""
        with trace.span("step", "step", step=step, version=version), self._profiled(step):
            return self._policy.step(groups, load_trajectories, step, version)

    def _profiled(self, step: int) -> AbstractContextManager[None]:
        observe = self._config.observe
        if step not in observe.profile_steps or self._rank not in observe.profile_ranks:
            return nullcontext()
        from megasync.trainer.profile import profiled

        return profiled(self._run_dir, step, self._rank)

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of all tokens of each sequence except the first, under the current weights."""
        return self._learner.logprobs(sequences)

    def begin_save(self, path: str, state: dict[str, Any]) -> None:
        """Begins to write a checkpoint, with that of the critic in it; see `MegatronLearner.begin_save`."""
        critic = nullcontext({}) if self._critic is None else self._critic.saved()
        with trace.span("rank", "save"), critic as inner:
            self._learner.begin_save(Path(path), state, inner)

    def finish_save(self, wait: bool) -> bool:
        """Whether that checkpoint is complete; see `MegatronLearner.finish_save`."""
        return self._learner.finish_save(wait)

    def load(self, path: str) -> None:
        """Restores a checkpoint with its critic, and the reference weights of its step; see `MegatronLearner.load`."""
        from megasync.trainer.checkpoint import reference_step, step_of, step_path

        if renewed := reference_step(step_of(Path(path)), self._config.algorithm.reference_every):
            self._learner.load_reference(step_path(self._run_dir, renewed))
        self._learner.load(Path(path))
        if self._critic is not None:
            self._critic.load(Path(path))

    # Weight sync: `sync.weight_sync.SendingRank`. A sender is built when its transport first calls it.

    @cached_property
    def _broadcast(self) -> BroadcastSender:
        from megasync.sync.broadcast.sender import BroadcastSender

        return BroadcastSender(self._shards.plan(self._bucket_bytes), self._shards, self._device, self._host)

    @cached_property
    def _disk(self) -> DiskWriter:
        from megasync.sync.disk.writer import DiskWriter

        return DiskWriter(self._shards.plan(self._bucket_bytes), self._shards, self._device, self._host)

    @cached_property
    def _shard(self) -> ShardSender:
        from megasync.sync.shard.sender import ShardSender
        from megasync.sync.shared_memory import link_backend

        links = link_backend(self._config.cluster.colocate, self._device)
        return ShardSender(self._shards, self._bucket_bytes, self._device, self._host, links)

    sync_listen = _of_sender(SendingRank.sync_listen)
    sync_join = _of_sender(SendingRank.sync_join)
    sync_send = _of_sender(SendingRank.sync_send)
    sync_leave = _of_sender(SendingRank.sync_leave)
    shard_listen = _of_sender(SendingRank.shard_listen)
    shard_prepare = _of_sender(SendingRank.shard_prepare)
    shard_send = _of_sender(SendingRank.shard_send)
    shard_leave = _of_sender(SendingRank.shard_leave)
    disk_listen = _of_sender(SendingRank.disk_listen)
    disk_join = _of_sender(SendingRank.disk_join)
    disk_write = _of_sender(SendingRank.disk_write)
    disk_leave = _of_sender(SendingRank.disk_leave)

    def stop(self) -> None:
        """Leaves all groups and ends the process group."""
        import torch

        trace.stop()
        for sender in _SENDERS.values():
            if sender in vars(self):
                getattr(self, sender).leave()
        close_buffers()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
