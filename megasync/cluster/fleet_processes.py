"""The processes of the rollout pool, by the numbers of their servers, and the clients that control them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from megasync.cluster.pools import Pools
from megasync.cluster.router_slot import RouterProcess, ServerList
from megasync.cluster.server_slot import ServerProcess
from megasync.cluster.service_actors import EngineGroup, ServiceActor, SpreadServer
from megasync.config import Config
from megasync.config.access import KEY_BYTES, Keys, router_trust
from megasync.config.pools import engine_devices, engine_nodes, engines, server_devices, server_slots
from megasync.device import Device
from megasync.serving.cache_size import longest_request
from megasync.serving.control import ServerControl
from megasync.serving.disaggregated_control import DisaggregatedControl
from megasync.serving.external_server import ExternalServer
from megasync.serving.router import Router, RouterMembers
from megasync.serving.server import EngineRole, ServerSpec, SGLangServer, served_adapters

# Seconds to wait for Ray to place an added server; where there is room it answers immediately.
PLACE_SECONDS = 15.0


class FleetProcesses:
    """Makes servers and their router, in Ray's actors or from `rollout.external`. The simulator overrides it."""

    def __init__(self, config: Config, run_dir: Path, device: Device, pools: Pools, keys: Keys) -> None:
        self._config = config
        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._nodes = engine_nodes(config)
        self._device = device
        self._pools = pools
        self._keys = keys

    @property
    def shared_devices(self) -> int | None:
        """The number of devices, if they are those of the trainer ranks; there is no room for more servers."""
        return self._pools.specs["trainer"].slots if self._config.cluster.colocate else None

    async def place(self, index: int) -> None:
        """Reserves the devices of an added server. Raises MegasyncError, and reserves nothing, without room."""
        try:
            for slot in self._pool_slots(index):
                await self._pools.add_slot("rollout", slot, PLACE_SECONDS)
        except BaseException:
            self.release(index)
            raise

    def release(self, index: int) -> None:
        """Gives the devices of a server back."""
        for slot in self._pool_slots(index):
            self._pools.remove_slot("rollout", slot)

    def _pool_slots(self, index: int) -> range:
        """The slots of the pool that a server takes: one for each of its engines, or on each of its nodes."""
        width = server_slots(self._config)
        return range(index * width, (index + 1) * width)

    def control(self, url: str, process: ServerProcess) -> ServerControl:
        """A client of a server that has started."""
        admin = self._keys.admin
        if not isinstance(process, EngineGroup):
            return ServerControl(url, admin)
        prefill, decode = ([ServerControl(each, admin) for each in part] for part in (process.prefill, process.decode))
        # The router before several decode engines does not get the admin key.
        return DisaggregatedControl(url, prefill, decode, admin if url in process.decode else self._keys.generation)

    def members(self, router_url: str) -> ServerList:
        """A client of the router's list of servers."""
        router = ServerControl(router_url, self._keys.router, router_trust(self._config.cluster))
        return RouterMembers(router, self._keys.generation)

    def server(self, index: int, shared_gpus: Sequence[str] = ()) -> ServerProcess:
        """The process of a server, not started. `shared_gpus` are those of the trainer ranks, if servers share them."""
        config, devices = self._config, server_devices(self._config.rollout)
        if config.rollout.external:
            return ExternalServer(config.rollout.external[index], config, self._keys.admin)
        spec = ServerSpec(
            config.model.path,
            config.rollout,
            config.model.dtype,
            self._device.kind,
            config.seed + index,
            config.rollout.deterministic,
            self._nodes,
            gpus=",".join(shared_gpus[index * devices : (index + 1) * devices]),
            releases_memory=config.cluster.colocate,
            metrics=config.observe.prometheus is not None,
            adapters=served_adapters(config, self._run_dir),
            longest=longest_request(config, config.rollout),
        )
        slots, name = self._pool_slots(index), server_name(index)

        def actor(slot: int, log_name: str, *rest: object) -> ServiceActor:
            keys = self._keys.admin, self._keys.generation
            arguments = (spec, config.cluster.host, 0, str(self._logs / f"{log_name}.log"), *keys, *rest)
            return ServiceActor(SGLangServer, arguments, self._pools, "rollout", slot)

        def part(node: int, meeting_point: tuple[str, int] | None = None) -> ServiceActor:
            return actor(slots[node], name if node == 0 else f"{name}-node-{node}", node, meeting_point)

        if (count := engines(config.rollout)) == 1:
            return part(0) if self._nodes == 1 else SpreadServer(part, self._nodes)

        width, key = engine_devices(config.rollout), secrets.token_hex(KEY_BYTES)
        kinds = ["prefill"] * config.rollout.prefill_engines + ["decode"] * config.rollout.decode_engines

        def engine(number: int, kind: str) -> ServiceActor:
            role = EngineRole(kind, number * width, count * width, key)
            return actor(slots[number], f"{name}-{kind}-{number - kinds.index(kind)}", 0, None, role)

        parts = [engine(number, kind) for number, kind in enumerate(kinds)]
        first = config.rollout.prefill_engines
        return EngineGroup(parts[:first], parts[first:], partial(self._front, index))

    def _front(self, index: int, decode: Sequence[str]) -> ServiceActor:
        """The router before the decode engines of a server, beside its first engine."""
        config, log_path = self._config, str(self._logs / f"{server_name(index)}-router.log")
        timeout = config.timeouts.request
        arguments = (list(decode), "round_robin", config.cluster.host, 0, log_path, timeout, self._keys)
        return ServiceActor(Router, arguments, self._pools, "rollout", self._pool_slots(index)[0], beside=True)

    def router(self, servers: Collection[str], port: int) -> RouterProcess:
        """The process of a router before these servers, not started; ``port`` is 0 for any."""
        config = self._config
        log_path = str(self._logs / "router.log")
        arguments = (
            list(servers),
            config.rollout.router_policy,
            config.cluster.host,
            port,
            log_path,
            config.timeouts.request,
            self._keys,
            config.cluster,
        )
        return ServiceActor(Router, arguments, self._pools, "rollout", 0, beside=True)


def server_name(index: int) -> str:
    """The name of a rollout server in logs and events."""
    return f"server-{index}"
