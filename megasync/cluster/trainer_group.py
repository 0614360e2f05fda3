"""All trainer ranks as one unit: started, called, restarted and stopped together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from megasync.buffer.payload import LeasedGroup
from megasync.cluster.actors import ActorGroup
from megasync.cluster.pools import Pools
from megasync.concurrency.tasks import wait_for_first
from megasync.config import Config
from megasync.errors import CheckpointError, MegasyncError, ProcessLost, RankLost
from megasync.layout.topology import Topology
from megasync.observe import trace
from megasync.observe.clock import clock_offsets
from megasync.observe.context import RunContext
from megasync.observe.hang import RunProcess
from megasync.observe.state_file import RankState
from megasync.sync.weight_sync import SendingRank
from megasync.trainer import checkpoint
from megasync.trainer.rank import TrainerRank

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Transports call methods of the protocol; a type checker compares it with the class.
SENDING: type[SendingRank] = TrainerRank

# Seconds for an idle rank to answer a liveness check.
ANSWER_SECONDS = 60.0
# Seconds between two looks for a lost node: while nothing can go on without it, and while training does.
POLL_SECONDS = 1.0
GROW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Saved:
    """A new checkpoint, and the step of the oldest one that is kept."""

    path: Path
    oldest_step: int


class TrainerGroup:
    """Every method calls all ranks and returns rank 0's answer; `on_all` returns every rank's.

    Every method raises RankLost when a rank has died or hangs. The others are useless without it; `restart` replaces
    them.
    """

    def __init__(
        self, config: Config, run_dir: Path, pools: Pools, context: RunContext, rank: type[TrainerRank] = TrainerRank
    ) -> None:
        self._rank = rank
        self._config = config
        self._timeouts = config.timeouts
        self._run_dir = run_dir
        self._pools = pools
        # Of the present ranks, which may be fewer than configured: see `trainer.min_data_parallel`.
        self._topology = Topology.from_config(config.trainer)
        self._slots = list(range(self._topology.world))
        self._ask_again = 0.0
        self._pids: list[int] = []
        # Of each rank, the Ray id of its node, and the name of its device.
        self._nodes: list[str] = []
        self._devices: list[str] = []
        # The checkpoint that was begun last.
        self._saving = run_dir
        self._actors = self._create()
        self._reports = context.reports

    @property
    def data_parallel(self) -> int:
        """The data-parallel size of the present ranks."""
        return self._topology.data

    def states(self) -> list[RankState]:
        """The present ranks, for `state.json`; without process ids until they are placed."""
        pids: list[int | None] = [*self._pids] or [None] * self._topology.world
        nodes, devices = (names or [""] * len(pids) for names in (self._nodes, self._devices))
        return [
            RankState(rank=rank, pid=pid, node=node, device=device)
            for rank, (pid, node, device) in enumerate(zip(pids, nodes, devices, strict=True))
        ]

    def processes(self) -> list[RunProcess]:
        """The processes of the ranks."""
        return [RunProcess(f"rank {each.rank}", each.node, each.pid) for each in self.states() if each.pid is not None]

    def _create(self) -> ActorGroup:
        config = replace(self._config, trainer=replace(self._config.trainer, data_parallel=self.data_parallel))
        arguments = [(config, rank, self._topology.world, str(self._run_dir)) for rank in range(self._topology.world)]
        options = [self._pools.options("trainer", slot) for slot in self._slots]
        return ActorGroup.create("trainer", self._rank, arguments, options)

    async def start(self, path: Path | None) -> None:
        """Builds the ranks' process group and models, from the checkpoint at `path` if given."""
        limit = self._timeouts.trainer_start
        placed = asyncio.ensure_future(self.on_all(limit, TrainerRank.pid))
        if self._config.trainer.min_data_parallel is None:
            self._pids = await placed
        else:
            await wait_for_first(placed, asyncio.ensure_future(self._node_lost()))
            self._pids = placed.result()
        nodes = await self._pools.nodes("trainer")
        self._nodes = [nodes.get(slot, "") for slot in self._slots]
        offsets = await clock_offsets(
            await self.on_all(limit, TrainerRank.clock),
            lambda slot: self._actors.on_one(slot, limit, TrainerRank.clock),
        )
        address = (await self.on_all(limit, TrainerRank.rendezvous))[0]
        assert address is not None
        self._devices = await self.on_all(limit, TrainerRank.start, *address, offsets)
        if path is not None:
            await self.on_all(limit, TrainerRank.load, str(path))

    async def restart(self) -> dict[str, Any] | None:
        """Kills the remaining ranks and starts new ones from the run's newest complete checkpoint.

        They are fewer if a lost node does not return within `timeouts.lost_node` seconds and
        `trainer.min_data_parallel` allows it, and as many as configured once all nodes are back. Returns the state
        saved with that checkpoint, or None when there is none and the ranks hold the initial weights.
        """
        with trace.span("trainer", "restart"):
            self._actors.kill()
            pids = dict(zip(self._slots, self._pids, strict=False))
            living = await self._pools.living_slots("trainer")
            remaining = {slot: pid for slot, pid in pids.items() if slot in living}
            await self._pools.kill_unresponsive("trainer", TrainerRank, remaining, ANSWER_SECONDS)
            self._pids, self._nodes, self._devices = [], [], []
            if self._config.trainer.min_data_parallel is not None:
                await self._place(self._config.trainer.min_data_parallel)
            self._actors = self._create()
            newest = checkpoint.latest(self._run_dir)
            await self.start(newest)
        return None if newest is None else checkpoint.read_state(newest)

    async def _place(self, least: int) -> None:
        """Chooses the slots of new ranks: all, or those of the nodes that are left if the others do not return."""
        configured, deadline = Topology.from_config(self._config.trainer), time.monotonic() + self._timeouts.lost_node
        slots = await self._pools.living_slots("trainer")
        while len(slots) < configured.world and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            slots = await self._pools.living_slots("trainer")
        topology = configured.largest_on(len(slots), least)
        if topology is None:
            raise RankLost(
                f"the nodes that are left have room for {len(slots)} of {configured.world} trainer ranks, fewer than "
                f"trainer.min_data_parallel={least} needs"
            )
        self._topology, self._slots = topology, slots[: topology.world]

    async def _node_lost(self) -> None:
        """Raises RankLost when a node of the ranks is lost. A rank that was placed on it would wait for its return."""
        while set(self._slots) <= set(await self._pools.living_slots("trainer")):  # noqa: ASYNC110 - Ray has no event
            await asyncio.sleep(POLL_SECONDS)
        raise RankLost("a node was lost while trainer ranks were started on it")

    async def can_grow(self) -> bool:
        """Whether `restart` would find room for more ranks, because nodes are back. Asks Ray every `GROW_SECONDS`."""
        configured, now = Topology.from_config(self._config.trainer), time.monotonic()
        if self._topology == configured or now < self._ask_again:
            return False
        self._ask_again = now + GROW_SECONDS
        room = len(await self._pools.living_slots("trainer"))
        return configured.largest_on(room, self.data_parallel + 1) is not None

    async def check(self) -> None:
        """Raises RankLost when a rank is dead or does not answer. Call it only while the ranks are idle."""
        await self.on_all(ANSWER_SECONDS, TrainerRank.pid)

    async def on_all(
        self, timeout: float, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls a method of `TrainerRank` on every rank; answers in rank order."""
        try:
            return await self._actors.on_all(timeout, method, *args, **kwargs)
        except ProcessLost as error:
            loss = RankLost(str(error))
            loss.slots, loss.silent = error.slots, error.silent
            if loss.silent:
                # Before anybody ends the ranks.
                await self._reports.report(str(loss), {process.name for process in self.processes()})
            raise loss from error

    async def step(self, groups: list[LeasedGroup], step: int, version: int) -> dict[str, float]:
        with trace.span("trainer", "train", step=step, version=version):
            return (await self.on_all(self._timeouts.train_step, TrainerRank.step, groups, step, version))[0]

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token but the first of each sequence."""
        return (await self.on_all(self._timeouts.train_step, TrainerRank.logprobs, sequences))[0]

    async def offload(self) -> None:
        """Leaves only weights on the devices, so that others can use the rest. No step or save until `restore`."""
        await self.on_all(self._timeouts.train_step, TrainerRank.offload)

    async def restore(self) -> None:
        """Undoes `offload`; has no effect on ranks that are not offloaded."""
        await self.on_all(self._timeouts.train_step, TrainerRank.restore)

    async def gpus(self) -> list[str]:
        """The GPUs of all ranks, in the format of CUDA_VISIBLE_DEVICES; none on a CPU."""
        visible = await self.on_all(ANSWER_SECONDS, TrainerRank.visible_devices)
        return sorted({gpu for gpus in visible for gpu in gpus.split(",") if gpu})

    async def begin_save(self, step: int, state: dict[str, Any]) -> None:
        """Begins to write the checkpoint of a step; ranks may train meanwhile. Raises CheckpointError as `finish_save`.

        A checkpoint that was begun before must be finished.
        """
        self._saving = checkpoint.step_path(self._run_dir, step)
        with trace.span("trainer", "checkpoint", step=step):
            await self._on_saving(TrainerRank.begin_save, str(self._saving), state)

    async def finish_save(self, wait: bool) -> Saved | None:
        """The checkpoint that was begun, once it is complete; None without ``wait`` as long as ranks write it.

        Removes older ones beyond `checkpoint.keep`. Raises CheckpointError, which names the earlier checkpoint to
        continue from, if the new one could not be written.
        """
        with trace.span("trainer", "finish checkpoint"):
            if not await self._on_saving(TrainerRank.finish_save, wait):
                return None
        keep, every = self._config.checkpoint.keep, self._config.algorithm.reference_every
        kept = [checkpoint.step_of(path) for path in checkpoint.complete(self._run_dir)[-keep:]]
        # A resumed run reads its reference weights from them.
        needed = {checkpoint.reference_step(step, every) for step in kept}
        await asyncio.to_thread(checkpoint.prune, self._run_dir, keep, needed)
        return Saved(self._saving, kept[0])

    async def _on_saving(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return (await self.on_all(self._timeouts.train_step, method, *args, **kwargs))[0]
        except CheckpointError as error:
            kept = checkpoint.latest(self._run_dir)
            fix = (
                f"fix the cause, then `megasync resume {self._run_dir}` continues from {kept.name}"
                if kept
                else "there is no earlier one to continue from"
            )
            raise CheckpointError(f"{error}; {fix}") from error

    async def stop(self) -> None:
        """Asks the ranks to leave their process groups, then kills their processes whatever they answered."""
        try:
            # Not by `on_all`: a rank that hangs now is not worth a report.
            await self._actors.on_all(self._timeouts.shutdown, TrainerRank.stop)
        except (MegasyncError, asyncio.CancelledError) as error:
            log.debug("Trainer ranks did not stop cleanly: %r", error)
        finally:
            self._actors.kill()
