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
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from megasync.cluster.actors import ServiceActor
from megasync.cluster.pools import Pools
from megasync.cluster.server_slot import ServerProcess, ServerSlot, raise_supervision_error
from megasync.cluster.slot_faults import SlotFaults
from megasync.concurrency.tasks import cancel_and_wait, gather_or_cancel
from megasync.config import Config
from megasync.config.access import Keys
from megasync.config.pools import frozen_models, frozen_pool
from megasync.device import Device
from megasync.errors import ServerError
from megasync.observe.events import NO_EVENTS, EventSink
from megasync.observe.hang import NO_REPORTS, HangSink, RunProcess
from megasync.observe.state_file import ProcessState
from megasync.serving.cache_size import longest_request
from megasync.serving.control import ServerControl
from megasync.serving.health import ServerState
from megasync.serving.server import frozen_server_spec

log = logging.getLogger(__name__)

# Maps a rollout server's number to its GPUs.
DevicesOf = Callable[[int], Awaitable[str]]


class ModelUsers(Protocol):
    """Learns which servers of a model, named by its key, there are."""

    def add_server(self, model: str, url: str) -> None: ...
    def remove_server(self, model: str, url: str) -> None: ...


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
        users: ModelUsers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._logs = run_dir / "logs"
        self._device = device
        self._pools = pools
        self._keys = keys
        self._users = users
        self._clock = clock
        self._models = frozen_models(config)
        self._slots: dict[str, list[ServerSlot]] = {key: [] for key in self._models}
        self._restarts = dict.fromkeys(self._models, 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._last_retired: dict[str, str] = {}
        self._faults = SlotFaults(NO_EVENTS)
        self.reports: HangSink = NO_REPORTS

    def report_to(self, events: EventSink) -> None:
        """Records faults and recoveries of the servers there."""
        self._faults = SlotFaults(events)

    async def start_own(self) -> None:
        """Starts the models that have a pool. Raises MegasyncError, with the log, when a server does not start."""
        await self._start("own", None)

    async def start_shared(self, devices_of: DevicesOf) -> None:
        """Starts the models that share the rollout pool, in the memory that its servers leave free."""
        await self._start("rollout", devices_of if self._device.kind == "cuda" else None)

    async def watch(self) -> None:
        """Raises ServerError when a model has no server left and none can be restarted."""
        raise_supervision_error(self._tasks)
        for key, slots in self._slots.items():
            if key in self._last_retired and not slots:
                raise ServerError(f"{key} has no server left (rollout.health.restarts). {self._last_retired[key]}")

    def processes(self) -> list[RunProcess]:
        """The running processes of the servers."""
        slots = [(frozen_name(key, slot.index), slot) for key, slots in self._slots.items() for slot in slots]
        return [process for name, slot in slots for process in slot.processes(name)]

    def states(self) -> list[ProcessState]:
        """Every server, for `state.json`."""
        return [slot.described(frozen_name(key, slot.index)) for key, slots in self._slots.items() for slot in slots]

    def metrics(self) -> dict[str, float]:
        """Per model: servers that are up, and restarts."""
        metrics: dict[str, float] = {}
        for key, slots in self._slots.items():
            values = {
                "servers": float(sum(slot.health.up for slot in slots)),
                "restarts": float(self._restarts[key]),
            }
            metrics |= {f"{key.replace('.', '/')}/{name}": value for name, value in values.items()}
        return metrics

    def metrics_urls(self) -> dict[str, str]:
        """Where the metrics of each server that is up can be scraped. Safe in any thread."""
        return {
            frozen_name(key, slot.index): f"{slot.url}/metrics"
            for key, slots in list(self._slots.items())
            for slot in list(slots)
            if slot.health.up
        }

    async def stop(self) -> None:
        try:
            await cancel_and_wait(*self._tasks)
        finally:
            self._tasks.clear()
            await asyncio.gather(*(slot.close() for slots in self._slots.values() for slot in slots))
            self._slots = {key: [] for key in self._slots}

    async def _start(self, pool: str, devices_of: DevicesOf | None) -> None:
        # Models that share memory start one after the other: each gets a share of what the earlier ones left free.
        for batch in self._batches(pool):
            slots = []
            for key, index in batch:
                gpus = await self._gpus(key, index, devices_of)
                slots.append((key, self._new_slot(key, index, gpus)))
            await gather_or_cancel(*(slot.start() for _, slot in slots))
            for key, slot in slots:
                log.info("%s: server at %s", key, slot.url)
                self._tasks.append(asyncio.create_task(slot.run(), name=f"{key} {slot.index}"))

    def _batches(self, pool: str) -> list[list[tuple[str, int]]]:
        """(key, number) of the servers, in batches that start concurrently."""
        models = {key: model for key, model in self._models.items() if model.pool == pool}
        each = [[(key, index) for index in range(model.servers)] for key, model in models.items()]
        return each if pool == "rollout" else [[server for batch in each for server in batch]]

    async def _gpus(self, key: str, index: int, devices_of: DevicesOf | None) -> str:
        if devices_of is None:
            return ""
        gpus = (await devices_of(index)).split(",")
        return ",".join(gpus[: self._models[key].tensor_parallel])

    def _new_slot(self, key: str, index: int, gpus: str) -> ServerSlot:
        slot = ServerSlot(
            self._config,
            index,
            lambda: self._process(key, index, gpus),
            lambda url, _: ServerControl(url, self._keys.admin),
            lambda slot, before: self._on_change(key, slot, before),
            self._clock,
            f"{key}, server",
        )
        name = frozen_name(key, index)
        slot.on_silent = lambda reason: self.reports.report(f"{name} does not answer: {reason}", {name})
        self._slots[key].append(slot)
        return slot

    def _on_change(self, key: str, slot: ServerSlot, before: ServerState) -> None:
        state = slot.health.state
        self._faults.changed(frozen_name(key, slot.index), slot, before)
        if state.up and not before.up and slot.control:
            self._restarts[key] += slot.starts > 1
            self._users.add_server(key, slot.url)
            # Its weights never change.
            slot.note(slot.health.synced)
        elif before.up and not state.up:
            self._users.remove_server(key, slot.url)
        if state is ServerState.RETIRED:
            self._slots[key].remove(slot)
            self._last_retired[key] = f"The last server lost was {slot.index}: {slot.health.reason}"

    def _process(self, key: str, index: int, gpus: str) -> ServerProcess:
        config, model = self._config, self._models[key]
        shared = model.pool == "rollout"
        mem_fraction = self._free_share(key) if shared else model.mem_fraction
        dtype = model.dtype or config.model.dtype
        scraped = config.observe.prometheus is not None
        # What a teacher computes is trained on, as what the policy's servers compute.
        exact = config.rollout.deterministic and key.startswith("teachers.")
        seed = config.seed + index
        longest = longest_request(config, model)
        spec = frozen_server_spec(model, dtype, self._device.kind, mem_fraction, seed, gpus, scraped, exact, longest)
        log_path = str(self._logs / f"{frozen_name(key, index)}.log")
        keys = (self._keys.admin, self._keys.generation)
        arguments = (model, spec, config.cluster.host, 0, log_path, *keys)
        pool = "rollout" if shared else frozen_pool(key)
        options = self._pools.same_node_options(pool, index) if shared else self._pools.options(pool, index)
        ended, node = partial(self._pools.ended, pool, index), partial(self._pools.node, pool, index)
        return ServiceActor("frozen_model", index, options, arguments, ended, node)

    def _free_share(self, key: str) -> float:
        """The model's share of a shared device, as SGLang expects it: as a share of what earlier servers left free."""
        free = 1 - self._config.rollout.mem_fraction
        for other, model in self._models.items():
            if other == key:
                break
            if model.pool == "rollout":
                free -= model.mem_fraction
        return self._models[key].mem_fraction / free


def frozen_name(key: str, index: int) -> str:
    """The name of a server of a frozen model in logs and events, such as `reward-judge-0`."""
    return f"{frozen_pool(key)}-{index}"
