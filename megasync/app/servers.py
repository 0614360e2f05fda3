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

from megasync.app.rollout_worker import ServersOfWorkers, build_worker, worker_setup
from megasync.app.workload import PythonArguments, Task
from megasync.cluster.fleet import Fleet
from megasync.cluster.fleet_processes import FleetProcesses
from megasync.cluster.frozen_servers import FrozenServers
from megasync.cluster.pools import Pools
from megasync.cluster.ray_cluster import RayCluster
from megasync.cluster.rollout_workers import RolloutWorkers, WorkerActor
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys, router_trust
from megasync.config.pools import PoolSpec, devices_needed
from megasync.device import Device
from megasync.observe.hang import HangReporter
from megasync.observe.observer import RunObserver
from megasync.rollout.client import RequestSettings, RolloutClient, ServedModel
from megasync.rollout.quarantine import Quarantine
from megasync.serving.control import ServerControl

# Below the run directory: one file for each prompt that kills servers or rollout workers.
POISON_FOLDER = "poison"
# While Ray connects or disconnects, signals are restored as often: a SIGTERM in between aborts the process.
RESTORE_SECONDS = 0.05


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
    """The rollout servers and frozen models of one run or evaluation."""

    fleet: Fleet
    frozen_models: FrozenServers
    keys: Keys
    # Isolates prompts that kill the fleet's servers.
    quarantine: Quarantine
    # None if the driver does their work (`rollout.workers=0`).
    workers: RolloutWorkers | None

    @classmethod
    def build(
        cls,
        stack: AsyncExitStack,
        config: Config,
        run_dir: Path,
        device: Device,
        pools: Pools,
        task: Task,
        custom: PythonArguments | None = None,
    ) -> InferenceServers:
        """Starts nothing yet. The stack shuts down whatever is started later. `custom` is for the workers."""
        keys = Keys.draw(config.cluster, external=bool(config.rollout.external))
        processes = FleetProcesses(config, run_dir, device, pools, keys)
        fleet = Fleet(config, processes, task.vocab_size)
        stack.push_async_callback(fleet.stop)
        health = config.rollout.health
        hang_seconds = health.request_failures * (health.request_seconds + health.request_timeout)
        quarantine = Quarantine(fleet, run_dir / POISON_FOLDER, hang_seconds=hang_seconds)
        fleet.on_departure(quarantine.left)
        workers, clients = None, task.frozen_clients
        if config.rollout.workers:

            def process(number: int) -> WorkerActor:
                setup = worker_setup(config, run_dir, number, fleet.router_url, keys, task, custom or PythonArguments())
                return WorkerActor(number, pools, partial(build_worker, setup))

            workers = RolloutWorkers(config, process, quarantine, fleet.check_all, run_dir / POISON_FOLDER)
            clients = {key: ServersOfWorkers(workers, key) for key in clients}
        frozen_models = FrozenServers(config, run_dir, device, pools, keys, clients)
        stack.push_async_callback(frozen_models.stop)
        stack.push_async_callback(quarantine.close)
        if workers is not None:
            stack.push_async_callback(workers.stop)
        return cls(fleet, frozen_models, keys, quarantine, workers)

    def report_to(self, observer: RunObserver, reports: HangReporter) -> None:
        """Shows the servers and workers to the observer, with their faults and recoveries, and in hang reports."""
        self.fleet.reports = self.frozen_models.reports = reports
        reports.processes += [self.fleet.processes, self.frozen_models.processes]
        if self.workers is not None:
            self.workers.reports = reports
            reports.processes.append(self.workers.processes)
        self.fleet.report_to(observer)
        self.frozen_models.report_to(observer)
        parts = observer.parts
        parts.servers, parts.router = self.fleet.states, self.fleet.router_state
        parts.frozen_models = self.frozen_models.states
        observer.server_metrics = lambda: {**self.fleet.metrics_urls(), **self.frozen_models.metrics_urls()}
        if self.workers is not None:
            self.workers.events = observer
            parts.workers = self.workers.states

    async def start(self, shared_gpus: Sequence[str] = ()) -> None:
        """Starts all servers, then the workers. Frozen models that share devices start after the rollout servers.

        ``shared_gpus`` are those of the trainer ranks, if the rollout servers share them. Raises MegasyncError.
        """
        await gather_or_cancel(self._start_rollout_pool(shared_gpus), self.frozen_models.start_own())
        if self.workers is not None:
            servers = ServersOfWorkers(self.workers)
            self.fleet.follow(servers.add_server, servers.remove_server)
            await self.workers.start()

    async def _start_rollout_pool(self, shared_gpus: Sequence[str]) -> None:
        await self.fleet.start(shared_gpus)
        await self.frozen_models.start_shared(self.fleet.visible_devices)

    def client(
        self, stack: AsyncExitStack, config: Config, task: Task, controls: Sequence[ServerControl]
    ) -> RolloutClient:
        """A client that sends requests through the router and follows the servers that come and go."""
        client = RolloutClient(
            self.fleet.router_url,
            controls,
            ServedModel(task.vocab_size, task.context_length, task.tokenizer, task.stop_ids, task.routes),
            RequestSettings.of(config),
            api_key=self.keys.generation,
            trust=router_trust(config.cluster),
            quarantine=self.quarantine,
            on_invalid_answer=self.fleet.check_all,
            auxiliary=task.auxiliary,
        )
        stack.push_async_callback(client.close)
        self.fleet.follow(client.add_server, client.remove_server, known=controls)
        return client
