"""The servers of all reward models: their one owner in the driver. It is told which pool a model's servers live in.

A model with `pool: own` has a pool to itself; one with `pool: rollout` has server n put beside rollout server n, on the
same devices. Each server is a slot as in the fleet, watched and started again in the same way; its weights never change,
so it serves as soon as it is up, and no weight sync knows of it.

A model goes on with the servers that are left; requests wait while it has none. `watch` raises when it can have none again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from megasync.cluster.actor_process import ActorProcess
from megasync.cluster.pools import Pools
from megasync.cluster.server_slot import ServerProcess, ServerSlot
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import reward_pool
from megasync.device import Device
from megasync.errors import MegasyncError, ServerError
from megasync.serving.control import ServerControl
from megasync.serving.health import HealthPolicy, ServerHealth, ServerState
from megasync.serving.server import reward_server_spec

log = logging.getLogger(__name__)

# Given a rollout server's number, the GPUs that it runs on.
DevicesOf = Callable[[int], Awaitable[str]]


class Client(Protocol):
    """Who asks a model's servers."""

    def add_server(self, server: ServerControl) -> None: ...
    def remove_server(self, url: str) -> None: ...
    def metrics(self) -> dict[str, float]: ...


class RewardServers:
    """`clients` hear of every server of their model that comes up, and of each that goes."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        device: Device,
        pools: Pools,
        keys: Keys,
        clients: Mapping[str, Client],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._logs = run_dir / "logs"
        self._device = device
        self._pools = pools
        self._keys = keys
        self._clients = clients
        self._clock = clock
        self._policy = HealthPolicy.of(config.rollout.health)
        self._slots: dict[str, list[ServerSlot]] = {name: [] for name in config.reward_models}
        self._restarts = dict.fromkeys(config.reward_models, 0)
        self._tasks: dict[asyncio.Task, str] = {}
        self._last_gone: dict[str, str] = {}

    async def start_own(self) -> None:
        """Starts the models that have a pool. Raises MegasyncError with the log's end when a server does not start."""
        await self._start("own", None)

    async def start_shared(self, devices_of: DevicesOf) -> None:
        """Starts those that share the rollout pool, once its servers run: what they leave free is what these may take."""
        await self._start("rollout", devices_of if self._device.kind == "cuda" else None)

    async def watch(self) -> None:
        """Raises ServerError when a model has no server left and can have none again."""
        for task, name in self._tasks.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                if isinstance(error, MegasyncError):
                    raise error
                raise ServerError(f"the care for a server of reward model {name!r} broke: {error!r}") from error
        for name, slots in self._slots.items():
            if name in self._last_gone and not slots:
                raise ServerError(
                    f"reward model {name!r} has no server left (rollout.health.restarts). {self._last_gone[name]}"
                )

    def metrics(self) -> dict[str, float]:
        """Per model: servers that answer, how often servers were started again, and what the client counts."""
        metrics: dict[str, float] = {}
        for name, slots in self._slots.items():
            values = {
                "servers": float(sum(slot.health.up for slot in slots)),
                "restarts": float(self._restarts[name]),
            } | self._clients[name].metrics()
            metrics |= {f"reward_models/{name}/{key}": value for key, value in values.items()}
        return metrics

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._tasks.clear()
            await asyncio.gather(*(slot.close() for slots in self._slots.values() for slot in slots))
            self._slots = {name: [] for name in self._slots}

    async def _start(self, pool: str, devices_of: DevicesOf | None) -> None:
        # One after the other where memory is shared: each is told its share of what those before it left free.
        for batch in self._batches(pool):
            slots = []
            for name, index in batch:
                gpus = await self._gpus(name, index, devices_of)
                slots.append((name, self._new_slot(name, index, gpus)))
            await gather_or_cancel(*(slot.start() for _, slot in slots))
            for name, slot in slots:
                log.info("reward model %s: server at %s", name, slot.url)
                self._tasks[asyncio.create_task(slot.live(), name=f"reward model {name} {slot.index}")] = name

    def _batches(self, pool: str) -> list[list[tuple[str, int]]]:
        """(model, number) of the servers that start together."""
        models = {name: model for name, model in self._config.reward_models.items() if model.pool == pool}
        each = [[(name, index) for index in range(model.servers)] for name, model in models.items()]
        return each if pool == "rollout" else [[server for batch in each for server in batch]]

    async def _gpus(self, name: str, index: int, devices_of: DevicesOf | None) -> str:
        if devices_of is None:
            return ""
        gpus = (await devices_of(index)).split(",")
        return ",".join(gpus[: self._config.reward_models[name].tensor_parallel])

    def _new_slot(self, name: str, index: int, gpus: str) -> ServerSlot:
        timeouts = self._config.timeouts
        slot = ServerSlot(
            index,
            ServerHealth(self._policy, self._clock),
            lambda: self._process(name, index, gpus),
            self._config.rollout.health,
            timeouts.server_start,
            timeouts.shutdown,
            lambda url: ServerControl(url, self._keys.admin),
            lambda slot, before: self._on_change(name, slot, before),
            f"reward model {name}, server",
        )
        self._slots[name].append(slot)
        return slot

    def _on_change(self, name: str, slot: ServerSlot, before: ServerState) -> None:
        state, client = slot.health.state, self._clients[name]
        if state.up and not before.up:
            self._restarts[name] += slot.starts > 1
            client.add_server(slot.control)
            # It holds the only weights that it is ever to hold.
            slot.note(slot.health.synced)
        elif before.up and not state.up:
            client.remove_server(slot.url)
        if state is ServerState.RETIRED:
            self._slots[name].remove(slot)
            self._last_gone[name] = f"The last to go was server {slot.index}: {slot.health.reason}"

    def _process(self, name: str, index: int, gpus: str) -> ServerProcess:
        config, model = self._config, self._config.reward_models[name]
        shared = model.pool == "rollout"
        mem_fraction = self._free_share(name) if shared else model.mem_fraction
        dtype = model.dtype or config.model.dtype
        spec = reward_server_spec(model, dtype, self._device.kind, mem_fraction, config.seed + index)
        log_path = str(self._logs / f"reward-{name}-{index}.log")
        keys = (self._keys.admin, self._keys.generation)
        arguments = (model, spec, config.cluster.host, 0, log_path, *keys, gpus)
        pool = "rollout" if shared else reward_pool(name)
        return ActorProcess("reward_model", arguments, self._pools, slot=index, pool=pool, beside=shared)

    def _free_share(self, name: str) -> float:
        """The model's share of a shared device as a share of what those that start before it leave free, which is what
        SGLang goes by."""
        free = 1 - self._config.rollout.mem_fraction
        for other, model in self._config.reward_models.items():
            if other == name:
                break
            if model.pool == "rollout":
                free -= model.mem_fraction
        return self._config.reward_models[name].mem_fraction / free
