"""The serving side of a run or an evaluation: devices, servers, frozen models, rollout workers, and the client.

Whatever is opened is pushed on the caller's exit stack immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megasync.app.rollout_worker import WorkerSetup, local_worker, start_worker
from megasync.app.run_directory import OpenedRun
from megasync.app.workload import PythonArguments, Task
from megasync.buffer import AsyncBuffer
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.frozen_servers import FrozenServers
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.rollout_workers import RolloutWorkers, WorkerActor
from megasync.cluster.trainer_group import TrainerGroup
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys, sessions_key
from megasync.config.pools import PoolSpec, devices_needed
from megasync.device import Device
from megasync.errors import ConfigError
from megasync.models.hub import missing_here, snapshots
from megasync.observe.context import RunContext
from megasync.observe.observer import RunParts
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.worker_link import LocalProcess, WorkerProcess
from megasync.rollout.workflow import SessionWorkflow

# Below the run directory: one file for each prompt that kills servers or rollout workers.
POISON_FOLDER = "poison"
# While Ray connects or disconnects, signals are restored as often: a SIGTERM in between aborts the process.
RESTORE_SECONDS = 0.05


async def open_task(stack: AsyncExitStack, config: Config, task: Task) -> None:
    """Opens what the task's user code needs in the driver, before any process starts; the stack closes it."""
    stack.push_async_callback(task.close)
    if not config.rollout.workers:
        await task.open()


async def reserve_pools(stack: AsyncExitStack, config: Config, specs: Mapping[str, PoolSpec], device: Device) -> Pools:
    """Starts or joins Ray, reserves the pools and downloads models that are given by name to their nodes.

    Raises MegasyncError when the cluster has no room for the pools, ConfigError when a node cannot get a model.
    """
    cluster = RayCluster(config, devices_needed(specs))

    async def in_thread(call: Callable[[], None]) -> None:
        thread = asyncio.create_task(asyncio.to_thread(call))
        while not thread.done():
            await asyncio.wait({thread}, timeout=RESTORE_SECONDS)
            cluster.restore_signals()
        await thread

    # A thread cannot be cancelled: after a cancellation, `disconnect` waits until Ray is up and shuts it down.
    connecting = asyncio.create_task(in_thread(cluster.connect))

    async def disconnect() -> None:
        await asyncio.wait([connecting])
        await in_thread(cluster.close)

    stack.push_async_callback(disconnect)
    await asyncio.shield(connecting)
    pools = Pools(dict(specs), device.kind)
    stack.callback(pools.remove)
    await pools.create(config.timeouts.server_start)
    if (folders := {each.name: str(each.folder) for each in snapshots(config)}) and pools.several_nodes:
        refusals = [f"node {node}: {why}" for node, why in await pools.ask_nodes(missing_here, folders) if why]
        if refusals:
            raise ConfigError("; ".join(refusals))
    return pools


@dataclass(frozen=True, slots=True)
class InferenceServers:
    """The rollout servers, frozen models and rollout workers of one run or evaluation."""

    fleet: Fleet
    frozen_models: FrozenServers
    keys: Keys
    # Isolates prompts that kill the fleet's servers.
    quarantine: Quarantine
    workers: RolloutWorkers

    @classmethod
    def build(
        cls,
        stack: AsyncExitStack,
        config: Config,
        run_dir: Path,
        device: Device,
        pools: Pools,
        task: Task,
        context: RunContext,
        buffer: AsyncBuffer | None = None,
        custom: PythonArguments | None = None,
    ) -> InferenceServers:
        """Starts nothing yet. The stack shuts down whatever is started later.

        `custom` is for workers in other processes. An evaluation, which commits no groups, has no `buffer`.
        """
        keys = Keys.draw(config.cluster, external=bool(config.rollout.external))
        if isinstance(task.workflow, SessionWorkflow):
            keys = replace(keys, sessions=sessions_key(run_dir))
        processes = FleetProcesses(config, run_dir, device, pools, keys)
        fleet = Fleet(config, processes, task.vocab_size, context)
        stack.push_async_callback(fleet.stop)
        health = config.rollout.health
        hang_seconds = health.request_failures * (health.request_seconds + health.request_timeout)
        quarantine = Quarantine(fleet.reservations, run_dir / POISON_FOLDER, hang_seconds=hang_seconds)
        fleet.on_departure(quarantine.left)

        def process(number: int) -> WorkerProcess:
            parts = fleet.router.url, keys, task, custom or PythonArguments(), pools.several_nodes
            setup = WorkerSetup.of(config, run_dir, number, *parts)
            if not config.rollout.workers:
                return LocalProcess(partial(local_worker, setup, task, buffer))
            return WorkerActor(number, pools, partial(start_worker, setup))

        questions = {} if buffer is None else {"buffer": buffer.of_worker}
        poison = run_dir / POISON_FOLDER
        workers = RolloutWorkers(config, process, quarantine, fleet.check_all, context, poison, questions)
        frozen_models = FrozenServers(config, run_dir, device, pools, keys, workers, context)
        stack.push_async_callback(frozen_models.stop)
        stack.push_async_callback(quarantine.close)
        stack.push_async_callback(workers.stop)
        return cls(fleet, frozen_models, keys, quarantine, workers)

    def show(self, opened: OpenedRun, pools: Pools, trainer: TrainerGroup) -> None:
        """Shows all processes of a run to its observer, and in its hang reports."""
        fleet, models, workers = self.fleet, self.frozen_models, self.workers
        opened.reports.cover(pools.stacks, *(part.processes for part in (trainer, fleet, models, workers)))
        opened.observer.show(
            RunParts(
                servers=fleet.states,
                router=fleet.router.described,
                ranks=trainer.states,
                workers=workers.states,
                frozen_models=models.states,
                metrics_urls=lambda: {**fleet.metrics_urls(), **models.metrics_urls()},
            )
        )

    async def start(self, shared_gpus: Sequence[str] = ()) -> None:
        """Starts all servers, then the workers. Frozen models that share devices start after the rollout servers.

        ``shared_gpus`` are those of the trainer ranks, if the rollout servers share them. Raises MegasyncError.
        """
        await gather_or_cancel(self._start_rollout_pool(shared_gpus), self.frozen_models.start("own"))
        self.fleet.follow(
            lambda server: self.workers.add_server("", server.url), partial(self.workers.remove_server, "")
        )
        await self.workers.start()

    async def _start_rollout_pool(self, shared_gpus: Sequence[str]) -> None:
        await self.fleet.start(shared_gpus)
        await self.frozen_models.start("rollout", self.fleet.visible_devices)

    def scorer(self, stack: AsyncExitStack, config: Config, task: Task) -> RolloutClient:
        """A client that compares the log-probs of servers; whatever is generated is generated by the workers."""
        model = ServedModel(task.vocab_size, task.context_length)
        client = RolloutClient(self.fleet.router.url, [], model, RequestSettings.of(config))
        stack.push_async_callback(client.close)
        return client
