"""Placement groups: which nodes the trainer ranks and the servers own. One group per pool, one owner: `Pools`.

A pool (`config.pools`) is one bundle per node, strictly spread where it spans nodes, so slot -> node is plain division.
"""

from __future__ import annotations

import asyncio
import logging

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megasync.config.pools import PoolSpec
from megasync.errors import MegasyncError

log = logging.getLogger(__name__)


class Pools:
    """Creates the placement groups, hands out scheduling strategies, and removes what it created."""

    def __init__(self, specs: dict[str, PoolSpec], device_kind: str) -> None:
        self.specs = specs
        self._kind = device_kind
        self._groups: dict[str, PlacementGroup] = {}

    async def create(self, timeout: float) -> None:
        """Reserves every pool. `timeout` in seconds; MegasyncError says what the cluster has when it is not enough."""
        for name, spec in self.specs.items():
            strategy = "STRICT_SPREAD" if spec.nodes > 1 else "STRICT_PACK"
            self._groups[name] = placement_group(spec.bundles(self._kind), strategy=strategy, name=f"megasync-{name}")
        for name, group in self._groups.items():
            try:
                await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), timeout)
            except TimeoutError:
                spec = self.specs[name]
                raise MegasyncError(
                    f"pool {name!r} needs {spec.nodes} node(s) with {spec.bundles(self._kind)[0]} each, not free after "
                    f"{timeout:.0f} s; the cluster has {ray.cluster_resources()}. Add nodes, or ask for fewer ranks or "
                    f"servers."
                ) from None
            log.info("pool %s: %s", name, group.bundle_specs)

    def options(self, pool: str, slot: int) -> dict:
        """Ray actor options that place process number `slot` of a pool on its node."""
        spec = self.specs[pool]
        strategy = PlacementGroupSchedulingStrategy(
            self._groups[pool], placement_group_bundle_index=slot // spec.slots_per_node
        )
        devices = {"num_gpus": spec.devices} if self._kind == "cuda" else {}
        return {"scheduling_strategy": strategy, "num_cpus": spec.devices, **devices}

    def guest_options(self, pool: str) -> dict:
        """Options for a process that needs no device but should live on the pool's first node (the router)."""
        strategy = PlacementGroupSchedulingStrategy(self._groups[pool], placement_group_bundle_index=0)
        return {"scheduling_strategy": strategy, "num_cpus": 0}

    def neighbour_options(self, pool: str, slot: int) -> dict:
        """Options for a process that needs no device but must be on the node of process number `slot`."""
        return self.options(pool, slot) | {"num_cpus": 0, "num_gpus": 0}

    def remove(self) -> None:
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()
