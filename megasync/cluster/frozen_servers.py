"""The servers of all frozen models: reward models and auxiliary models.

A model with `pool: own` has a pool of its own. With `pool: rollout`, its server n shares the devices of rollout server
n. Each server is a slot as in the fleet, watched and restarted in the same way. Its weights never change, so it serves
as soon as it is up and takes no part in weight syncs.

A model continues with the servers that are left; requests wait while it has none. `watch` raises once none can come
back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from megasync.cluster.pools import Pools
from megasync.cluster.rollout_workers import RolloutWorkers
from megasync.cluster.server_slot import ServerProcess, ServerSlot
from megasync.cluster.service_actors import ServiceActor
from megasync.cluster.slots import Slots
from megasync.concurrency.tasks import gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import frozen_models, frozen_pool
from megasync.device import Device
from megasync.errors import ServerError
from megasync.observe.context import RunContext
from megasync.observe.hang import RunProcess
from megasync.observe.state_file import ProcessState
from megasync.serving.cache_size import longest_request
from megasync.serving.control import ServerControl
from megasync.serving.health import ServerState
from megasync.serving.server import SGLangServer, frozen_server_spec

log = logging.getLogger(__name__)

# Maps a rollout server's number to its GPUs.
DevicesOf = Callable[[int], Awaitable[str]]


class FrozenServers:
    """Starts, supervises and stops the servers; notifies `users` of those that come up and go.

    Models are named by their configuration keys, such as `auxiliary_models.refiner`.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        device: Device,
        pools: Pools,
        keys: Keys,
        users: RolloutWorkers,
        context: RunContext,
    ) -> None:
        self._config = config
        self._logs = run_dir / "logs"
        self._device = device
        self._pools = pools
        self._keys = keys
        self._users = users
        self._models = frozen_models(config)
        self._slots = {
            key: Slots(config, context, partial(_server_name, key), partial(self._on_change, key))
            for key in self._models
        }

    async def watch(self) -> None:
        """Raises ServerError when a model has no server left and none can be restarted."""
        for key, slots in self._slots.items():
            slots.watch()
            if slots.last_lost and not len(slots):
                raise ServerError(f"{key} has no server left (rollout.health.restarts). {slots.last_lost}")

    def processes(self) -> list[RunProcess]:
        """The running processes of the servers."""
        return [process for slots in self._slots.values() for process in slots.processes()]

    def states(self) -> list[ProcessState]:
        """Every server, for `state.json`."""
        return [slot.described() for slots in self._slots.values() for slot in slots]

    def metrics(self) -> dict[str, float]:
        """Per model: servers that are up, and restarts."""
        metrics: dict[str, float] = {}
        for key, slots in self._slots.items():
            prefix = key.replace(".", "/")
            metrics[f"{prefix}/servers"] = float(sum(slot.health.up for slot in slots))
            metrics[f"{prefix}/restarts"] = float(slots.restarts)
        return metrics

    def metrics_urls(self) -> dict[str, str]:
        """Where the metrics of each server that is up can be scraped. Safe in any thread."""
        every = [slot for slots in self._slots.values() for slot in slots]
        return {slot.name: f"{slot.url}/metrics" for slot in every if slot.health.up}

    async def stop(self) -> None:
        await asyncio.gather(*(slots.stop() for slots in self._slots.values()))

    async def start(self, pool: str, devices_of: DevicesOf | None = None) -> None:
        """Starts the models with this value of `pool`. Raises MegasyncError, with the log, when one does not start.

        Those that share the rollout pool start in the memory that its servers leave free on `devices_of` them.
        """
        # Models that share memory start one after the other: each gets a share of what the earlier ones left free.
        for batch in self._batches(pool):
            slots = []
            for key, index in batch:
                process = partial(self._process, key, index, await self._gpus(key, index, devices_of))
                slots.append((key, self._slots[key].add(index, process, self._control)))
            await gather_or_cancel(*(slot.start() for _, slot in slots))
            for key, slot in slots:
                log.info("%s: server at %s", key, slot.url)
                self._slots[key].supervise(slot)

    def _batches(self, pool: str) -> list[list[tuple[str, int]]]:
        """(key, number) of the servers, in batches that start concurrently."""
        models = {key: model for key, model in self._models.items() if model.pool == pool}
        each = [[(key, index) for index in range(model.servers)] for key, model in models.items()]
        return each if pool == "rollout" else [[server for batch in each for server in batch]]

    async def _gpus(self, key: str, index: int, devices_of: DevicesOf | None) -> str:
        if devices_of is None or self._device.kind != "cuda":
            return ""
        gpus = (await devices_of(index)).split(",")
        return ",".join(gpus[: self._models[key].tensor_parallel])

    def _control(self, url: str, process: ServerProcess) -> ServerControl:
        return ServerControl(url, self._keys.admin)

    def _on_change(self, key: str, slot: ServerSlot, before: ServerState) -> None:
        state = slot.health.state
        if state.up and not before.up and slot.control:
            self._users.add_server(key, slot.url)
            # Its weights never change.
            slot.note(slot.health.synced)
        elif before.up and not state.up:
            self._users.remove_server(key, slot.url)

    def _process(self, key: str, index: int, gpus: str) -> ServerProcess:
        config, model = self._config, self._models[key]
        shared = model.pool == "rollout"
        mem_fraction = self._free_share(key) if shared else model.mem_fraction
        spec = frozen_server_spec(
            model,
            model.dtype or config.model.dtype,
            self._device.kind,
            mem_fraction,
            seed=config.seed + index,
            # What a teacher computes is trained on, as what the policy's servers compute.
            deterministic=config.rollout.deterministic and key.startswith("teachers."),
            gpus=gpus,
            metrics=config.observe.prometheus is not None,
            longest=longest_request(config, model),
        )
        log_path = str(self._logs / f"{_server_name(key, index)}.log")
        arguments = (spec, config.cluster.host, 0, log_path, self._keys.admin, self._keys.generation)
        pool = "rollout" if shared else frozen_pool(key)
        return ServiceActor(SGLangServer, arguments, self._pools, pool, index, beside=shared)

    def _free_share(self, key: str) -> float:
        """The model's share of a shared device, as SGLang expects it: as a share of what earlier servers left free."""
        free = 1 - self._config.rollout.mem_fraction
        for other, model in self._models.items():
            if other == key:
                break
            if model.pool == "rollout":
                free -= model.mem_fraction
        return self._models[key].mem_fraction / free


def _server_name(key: str, index: int) -> str:
    """The name of a server of a frozen model in logs and events, such as `reward-judge-0`."""
    return f"{frozen_pool(key)}-{index}"
