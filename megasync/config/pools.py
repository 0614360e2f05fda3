"""The device pools that a run requests. Pure arithmetic over the configuration.

A pool that fits on one node is placed on one node; a larger pool takes whole nodes. So a tensor-parallel group never
spans nodes by accident, and the node of a slot follows by integer division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from megasync.config.schema import Config, FrozenModelConfig, RolloutConfig
from megasync.errors import ConfigError

# Pools for which the launcher can reserve nodes. A reserved node has the Ray resource `node_resource(pool)`. Each
# bundle takes one unit of it, and the amount exceeds any number of bundles.
NODE_POOLS = ("trainer", "rollout")
NODE_RESOURCE_AMOUNT = 10_000
# CPUs that a pool without devices reserves.
NO_DEVICE_CPUS = 0.01


def node_resource(pool: str) -> str:
    """Name of the Ray resource that marks nodes reserved for a pool."""
    return f"megasync_{pool}"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The request of a pool: `slots` processes with `devices` devices each, at most `slots_per_node` per node.

    A pool with a `share` below 1 leaves the rest of each device to another pool. One that is `within` another, of a
    single node, reserves nothing: its processes use the devices of the other pool.
    """

    name: str
    slots: int
    devices: int
    slots_per_node: int
    share: float = 1
    within: str = ""

    @property
    def nodes(self) -> int:
        return -(-self.slots // self.slots_per_node)

    @property
    def devices_reserved(self) -> float:
        """Devices that each process reserves at Ray."""
        return self.devices * self.share

    @property
    def total_devices(self) -> float:
        return self.slots * self.devices_reserved

    def bundles(self, kind: str) -> list[dict[str, float]]:
        """Ray resource bundles, one per node. A device is a GPU if `kind` is "cuda", otherwise a logical CPU."""
        per_node = min(self.slots, self.slots_per_node) * self.devices_reserved
        if not per_node:
            # A bundle must reserve something.
            return [{"CPU": NO_DEVICE_CPUS}]
        if kind == "cuda":
            return [{"GPU": per_node, "CPU": per_node} for _ in range(self.nodes)]
        return [{"CPU": per_node} for _ in range(self.nodes)]


def frozen_models(config: Config) -> dict[str, FrozenModelConfig]:
    """Reward models, auxiliary models and teachers by their configuration keys, such as `reward_models.judge`."""
    sections = ("reward_models", "auxiliary_models", "teachers")
    return {f"{section}.{name}": model for section in sections for name, model in getattr(config, section).items()}


def frozen_pool(key: str) -> str:
    """Name of the dedicated pool of a frozen model with `pool: own`, such as `reward-judge`."""
    section, _, name = key.partition(".")
    return f"{section.removesuffix('_models')}-{name}"


def pool_specs(config: Config, *, training: bool = True) -> dict[str, PoolSpec]:
    """The pools of a run by name; without the trainer's unless `training`. The configuration meets the rules of keys.

    Raises ConfigError if a pool that is larger than a node does not fill whole nodes.
    """
    rollout, per_node = config.rollout, config.cluster.devices_per_node
    pools = [trainer_pool(config)] if training else []
    if rollout.external:
        # The place of the router and of the rollout workers.
        pools.append(PoolSpec("rollout", slots=rollout.servers, devices=0, slots_per_node=rollout.servers))
    elif engines(rollout) > 1:
        pools.append(_engine_pool(config))
    elif server_devices(rollout) > per_node:
        pools.append(_spread_pool(config))
    else:
        pools.append(_server_pool("rollout", "rollout", rollout.servers, server_devices(rollout), per_node))
    if training and config.cluster.share_device:
        # Ray guarantees that two halves are of one device for halves of a single device only.
        pools = [replace(pool, share=0.5) for pool in pools]
    elif training and config.cluster.colocate:
        trainer, rollout_pool = pools
        pools = [trainer, replace(rollout_pool, slots_per_node=rollout_pool.slots, share=0, within=trainer.name)]
    pools += [
        _server_pool(frozen_pool(key), key, model.servers, model.tensor_parallel, per_node)
        for key, model in frozen_models(config).items()
        if model.pool == "own"
    ]
    return {pool.name: pool for pool in pools}


def trainer_pool(config: Config) -> PoolSpec:
    """The trainer's pool alone. Raises ConfigError as `pool_specs` does."""
    trainer, per_node = config.trainer, config.cluster.devices_per_node
    world = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel * trainer.context_parallel
    ranks = "ranks of the trainer (trainer.tensor_parallel x context_parallel x pipeline_parallel x data_parallel)"
    return _filling(PoolSpec("trainer", world, 1, per_node), f"{world} {ranks}", "trainer.data_parallel")


def engine_nodes(config: Config) -> int:
    """Nodes that an engine of a rollout server takes, with a process on each."""
    return 1 if config.rollout.external else max(1, engine_devices(config.rollout) // config.cluster.devices_per_node)


def engines(rollout: RolloutConfig) -> int:
    """Engines of a rollout server: those for prompts and those for responses, or one for both."""
    return max(1, rollout.prefill_engines + rollout.decode_engines)


def server_slots(config: Config) -> int:
    """Slots of the pool that a rollout server takes: one for each of its engines, or for each node of its only one."""
    return max(engines(config.rollout), engine_nodes(config))


def engine_devices(rollout: RolloutConfig) -> int:
    """Devices of an engine: one for each rank of each of its pipeline stages."""
    return rollout.tensor_parallel * rollout.pipeline_parallel


def server_devices(rollout: RolloutConfig) -> int:
    """Devices of a rollout server: those of its engines."""
    return engine_devices(rollout) * engines(rollout)


def attention_ranks(rollout: RolloutConfig) -> int:
    """Tensor-parallel ranks over which a server splits attention: those of one of its attention groups."""
    return rollout.tensor_parallel // rollout.attention_data_parallel


def _filling(pool: PoolSpec, what: str, keys: str) -> PoolSpec:
    """The pool. Raises ConfigError if it is larger than a node and does not fill whole nodes, as `what` says."""
    room = pool.slots_per_node
    if pool.slots > room and pool.slots % room:
        raise ConfigError(
            f"{what} are more than one node holds ({room}; cluster.devices_per_node) and not whole nodes; change "
            f"{keys} so that their number is a multiple of {room}"
        )
    return pool


def _engine_pool(config: Config) -> PoolSpec:
    """A pool with a slot for each engine of each server. Engines of one server may be on several nodes."""
    rollout, devices, each = config.rollout, engine_devices(config.rollout), engines(config.rollout)
    pool = PoolSpec("rollout", rollout.servers * each, devices, max(1, config.cluster.devices_per_node // devices))
    what = f"rollout.servers={rollout.servers} of {each} engines (prefill_engines + decode_engines)"
    return _filling(pool, f"{what} of {devices} devices each", "one of them")


def _spread_pool(config: Config) -> PoolSpec:
    rollout, per_node, nodes = config.rollout, config.cluster.devices_per_node, engine_nodes(config)
    tensor, pipeline = rollout.tensor_parallel, rollout.pipeline_parallel
    if tensor * pipeline % per_node:
        size = f"rollout.tensor_parallel={tensor}" + (f" x pipeline_parallel={pipeline}" if pipeline > 1 else "")
        raise ConfigError(
            f"{size} is more than a node has (cluster.devices_per_node={per_node}) and not whole nodes; make it a "
            f"multiple of {per_node}"
        )
    if per_node % tensor and tensor % per_node:
        raise ConfigError(
            f"rollout.tensor_parallel={tensor} puts a pipeline stage on parts of several nodes (cluster."
            f"devices_per_node={per_node}); choose a divisor or a multiple of {per_node}"
        )
    return PoolSpec("rollout", rollout.servers * nodes, per_node, slots_per_node=1)


def _server_pool(name: str, key: str, servers: int, devices: int, per_node: int) -> PoolSpec:
    """A pool of servers of ``devices`` each; `key` is the configuration section that describes them."""
    pool = PoolSpec(name, servers, devices, max(1, per_node // devices))
    return _filling(pool, f"{key}.servers={servers} of {devices} devices each", f"{key}.servers")


def devices_needed(specs: Mapping[str, PoolSpec]) -> int:
    """Number of devices for all pools."""
    return ceil(sum(spec.total_devices for spec in specs.values()))


def nodes_needed(specs: Mapping[str, PoolSpec], devices_per_node: int) -> int:
    """Number of nodes for all pools. They share a single node if all of them fit on it."""
    if devices_needed(specs) <= devices_per_node:
        return 1
    return sum(spec.nodes for spec in specs.values())
