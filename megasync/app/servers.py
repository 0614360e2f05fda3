"""The serving side of a run or an evaluation: devices, servers, frozen models, rollout workers, and the client.

Whatever is opened is pushed on the caller's exit stack immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megasync.app.rollout_worker import local_worker, start_worker, worker_setup
from megasync.app.workload import PythonArguments, Task
from megasync.buffer import AsyncBuffer
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.frozen_servers import FrozenServers
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.rollout_workers import RolloutWorkers, WorkerActor
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import PoolSpec, devices_needed
from megasync.device import Device
from megasync.observe.hang import HangReporter
from megasync.observe.observer import RunObserver
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.quarantine import Quarantine
from megasync.rollout.worker_link import LocalProcess, WorkerProcess

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
    """Starts or joins Ray and reserves the pools. Raises MegasyncError when the cluster has no room for them."""
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
        buffer: AsyncBuffer | None = None,
        custom: PythonArguments | None = None,
    ) -> InferenceServers:
        """Starts nothing yet. The stack shuts down whatever is started later.

        `custom` is for workers in other processes. An evaluation, which commits no groups, has no `buffer`.
        """
        keys = Keys.draw(config.cluster, external=bool(config.rollout.external))
        processes = FleetProcesses(config, run_dir, device, pools, keys)
        fleet = Fleet(config, processes, task.vocab_size)
        stack.push_async_callback(fleet.stop)
        health = config.rollout.health
        hang_seconds = health.request_failures * (health.request_seconds + health.request_timeout)
        quarantine = Quarantine(fleet, run_dir / POISON_FOLDER, hang_seconds=hang_seconds)
        fleet.on_departure(quarantine.left)

        def process(number: int) -> WorkerProcess:
            if not config.rollout.workers:
                return LocalProcess(partial(local_worker, config, run_dir, fleet.router_url, keys, task, buffer))
            parts = task, custom or PythonArguments(), pools.several_nodes
            setup = worker_setup(config, run_dir, number, fleet.router_url, keys, *parts)
            return WorkerActor(number, pools, partial(start_worker, setup))

        questions = {} if buffer is None else {"buffer": buffer.of_worker}
        poison = run_dir / POISON_FOLDER
        workers = RolloutWorkers(config, process, quarantine, fleet.check_all, poison, questions=questions)
        frozen_models = FrozenServers(config, run_dir, device, pools, keys, workers)
        stack.push_async_callback(frozen_models.stop)
        stack.push_async_callback(quarantine.close)
        stack.push_async_callback(workers.stop)
        return cls(fleet, frozen_models, keys, quarantine, workers)

    def report_to(self, observer: RunObserver, reports: HangReporter) -> None:
        """Shows the servers and workers to the observer, with their faults and recoveries, and in hang reports."""
        self.fleet.reports = self.frozen_models.reports = self.workers.reports = reports
        reports.processes += [self.fleet.processes, self.frozen_models.processes, self.workers.processes]
        self.fleet.report_to(observer)
        self.frozen_models.report_to(observer)
        self.workers.events = observer
        parts = observer.parts
        parts.servers, parts.router = self.fleet.states, self.fleet.router_state
        parts.frozen_models, parts.workers = self.frozen_models.states, self.workers.states
        observer.server_metrics = lambda: {**self.fleet.metrics_urls(), **self.frozen_models.metrics_urls()}

    async def start(self, shared_gpus: Sequence[str] = ()) -> None:
        """Starts all servers, then the workers. Frozen models that share devices start after the rollout servers.

        ``shared_gpus`` are those of the trainer ranks, if the rollout servers share them. Raises MegasyncError.
        """
        await gather_or_cancel(self._start_rollout_pool(shared_gpus), self.frozen_models.start_own())
        self.fleet.follow(
            lambda server: self.workers.add_server("", server.url), partial(self.workers.remove_server, "")
        )
        await self.workers.start()

    async def _start_rollout_pool(self, shared_gpus: Sequence[str]) -> None:
        await self.fleet.start(shared_gpus)
        await self.frozen_models.start_shared(self.fleet.visible_devices)

    def scorer(self, stack: AsyncExitStack, config: Config, task: Task) -> RolloutClient:
        """A client that compares the log-probs of servers; whatever is generated is generated by the workers."""
        model = ServedModel(task.vocab_size, task.context_length)
        client = RolloutClient(self.fleet.router_url, [], model, RequestSettings.of(config))
        stack.push_async_callback(client.close)
        return client
