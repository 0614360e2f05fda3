"""Which devices a run asks for: two pools, in whole nodes where they span several. Pure arithmetic over the config.

A pool that fits on one node is placed on one; a larger one takes whole nodes. So no tensor-parallel group is torn over
nodes by chance, and slot -> node is plain division.
"""

from __future__ import annotations

from dataclasses import dataclass

from megasync.config.schema import Config
from megasync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a pool asks of the cluster: `slots` processes of `devices` devices each, at most `slots_per_node` a node."""

    name: str
    slots: int
    devices: int
    slots_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.slots // self.slots_per_node)

    @property
    def total_devices(self) -> int:
        return self.slots * self.devices

    def bundles(self, kind: str) -> list[dict[str, float]]:
        """Ray resource bundles, one per node. Devices are GPUs on cuda and logical CPUs otherwise."""
        per_node = min(self.slots, self.slots_per_node) * self.devices
        if kind == "cuda":
            return [{"GPU": per_node, "CPU": per_node} for _ in range(self.nodes)]
        return [{"CPU": per_node} for _ in range(self.nodes)]


def pool_specs(config: Config) -> dict[str, PoolSpec]:
    """The two pools of a run. Raises ConfigError when one cannot be cut into whole nodes."""
    trainer, rollout, per_node = config.trainer, config.rollout, config.cluster.devices_per_node
    world = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel
    for key, size in (("trainer", trainer.tensor_parallel), ("rollout", rollout.tensor_parallel)):
        if size > per_node:
            raise ConfigError(
                f"{key}.tensor_parallel={size} does not fit on one node (cluster.devices_per_node={per_node}); "
                f"lower it, or raise cluster.devices_per_node"
            )
    if world > per_node and world % per_node:
        raise ConfigError(
            f"the trainer needs {world} ranks (trainer.tensor_parallel x pipeline_parallel x data_parallel), more than "
            f"one node has (cluster.devices_per_node={per_node}) and not whole nodes; change trainer.data_parallel so "
            f"that the product is a multiple of {per_node}"
        )
    servers_per_node = per_node // rollout.tensor_parallel
    if rollout.servers > servers_per_node and rollout.servers % servers_per_node:
        raise ConfigError(
            f"rollout.servers={rollout.servers} with rollout.tensor_parallel={rollout.tensor_parallel} are more than "
            f"one node holds ({servers_per_node}) and do not fill whole nodes; make rollout.servers a multiple of "
            f"{servers_per_node}"
        )
    return {
        "trainer": PoolSpec("trainer", slots=world, devices=1, slots_per_node=per_node),
        "rollout": PoolSpec("rollout", rollout.servers, rollout.tensor_parallel, slots_per_node=servers_per_node),
    }


def nodes_needed(specs: dict[str, PoolSpec], devices_per_node: int) -> int:
    """Nodes that the pools take together; pools smaller than a node share one when both fit on it."""
    if sum(spec.total_devices for spec in specs.values()) <= devices_per_node:
        return 1
    return sum(spec.nodes for spec in specs.values())
