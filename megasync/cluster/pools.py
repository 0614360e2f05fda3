"""Placement groups: which nodes the trainer ranks and the servers own. One group per pool; `Pools` owns them all.

A pool (`config.pools`) has one bundle per node, strictly spread where it spans nodes, so the node of a slot is a
division. A slot is the place of one process. Slots beyond a pool's initial size, of servers that joined a run later,
have a placement group each, so that they can come and go one by one wherever the cluster has room.

Nodes that have services of a run also have an agent each (`node_agents`), which ends with the pools.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megasync.cluster.actors import kill_process
from megasync.cluster.node_agents import NodeAgents
from megasync.concurrency.tasks import within
from megasync.config.pools import PoolSpec, node_resource
from megasync.errors import MegasyncError, ProcessLost, raised_as
from megasync.observe.hang import RunProcess
from megasync.observe.stacks import ProcessStacks
from megasync.serving.process_watch import ProcessId

log = logging.getLogger(__name__)


class Pools:
    """Creates the placement groups, places actors in them, and removes what it created."""

    def __init__(self, specs: dict[str, PoolSpec], device_kind: str) -> None:
        self.specs = specs
        self._kind = device_kind
        self._groups: dict[str, PlacementGroup] = {}
        self._added: dict[tuple[str, int], PlacementGroup] = {}
        self._agents = NodeAgents()
        # The nodes of slots, as far as somebody has asked for them.
        self._nodes: dict[tuple[str, int], str] = {}

    async def create(self, timeout: float) -> None:
        """Reserves every pool. Raises MegasyncError when one is not free within `timeout` seconds."""
        for name, spec in self.specs.items():
            if spec.within:
                continue
            strategy = "STRICT_SPREAD" if spec.nodes > 1 else "STRICT_PACK"
            bundles = [self._bundle(spec, bundle) for bundle in spec.bundles(self._kind)]
            self._groups[name] = placement_group(bundles, strategy=strategy, name=f"megasync-{name}")
        for name, group in self._groups.items():
            try:
                await within(asyncio.wrap_future(group.ready().future()), timeout)
            except TimeoutError:
                spec = self.specs[name]
                raise MegasyncError(
                    f"pool {name!r} needs {spec.nodes} node(s) with {spec.bundles(self._kind)[0]} each, not free after "
                    f"{timeout:.0f} s; the cluster has {ray.cluster_resources()}. Add nodes, or ask for fewer ranks or "
                    f"servers."
                ) from None
            log.info("Pool %s: %s", name, group.bundle_specs)

    async def add_slot(self, pool: str, slot: int, timeout: float) -> None:
        """Reserves devices for a slot beyond the pool's initial size; the initial slots need no such call.

        Raises MegasyncError when the cluster has no room for it within `timeout` seconds; nothing is reserved then.
        """
        spec = self.specs[pool]
        if slot < spec.slots or spec.within or (pool, slot) in self._added:
            return
        (bundle,) = (self._bundle(spec, bundle) for bundle in replace(spec, slots=1).bundles(self._kind))
        group = placement_group([bundle], strategy="PACK", name=f"megasync-{pool}-{slot}")
        try:
            await within(asyncio.wrap_future(group.ready().future()), timeout)
        except BaseException as error:
            remove_placement_group(group)
            if isinstance(error, TimeoutError):
                raise MegasyncError(
                    f"the Ray cluster has no room for another process of pool {pool!r}, which needs {bundle}: free are "
                    f"{_devices(ray.available_resources())} of {_devices(ray.cluster_resources())}; add a node, or "
                    f"stop what else runs there"
                ) from None
            raise
        self._added[pool, slot] = group

    def remove_slot(self, pool: str, slot: int) -> None:
        """Releases what `add_slot` reserved."""
        group = self._added.pop((pool, slot), None)
        if group is not None:
            remove_placement_group(group)

    @staticmethod
    def _bundle(spec: PoolSpec, bundle: dict[str, float]) -> dict[str, float]:
        """`bundle`, restricted to the nodes that are reserved for the pool if the cluster has such nodes."""
        resource = node_resource(spec.name)
        return bundle | ({resource: 1.0} if resource in ray.cluster_resources() else {})

    async def ended(self, pool: str, slot: int, process: ProcessId) -> None:
        """Returns when a process on the node of a slot has ended. Raises ProcessLost when the node is lost."""
        group, bundle = self._place(pool, slot)
        # In a thread, because it asks Ray's head, perhaps while hundreds of servers start.
        table = await asyncio.to_thread(placement_group_table, group)
        node = self._nodes[pool, slot] = table["bundles_to_node_id"][bundle]
        await self._agents.ended(node, process)

    @property
    def several_nodes(self) -> bool:
        """Whether processes of the run may be on other machines than this one."""
        return len(ray.nodes()) > 1

    def node(self, pool: str, slot: int) -> str:
        """The Ray id of the node of a slot whose process is waited for (`ended`); empty where it is not known."""
        return self._nodes.get((pool, slot), "")

    async def stacks(self, node: str, processes: Sequence[RunProcess], seconds: float) -> list[ProcessStacks]:
        """The stacks of processes of a node and of all that they have started (`observe.hang.ReadNode`)."""
        return await self._agents.stacks(node, [(process.name, process.pid) for process in processes], seconds)

    async def nodes(self, pool: str) -> dict[int, str]:
        """The Ray id of the node of each slot of a pool, as far as it is known."""
        spec = self.specs[pool]
        if spec.within:
            table = await asyncio.to_thread(placement_group_table, self._groups[spec.within])
            return dict.fromkeys(range(spec.slots), str(table["bundles_to_node_id"].get(0) or ""))
        table = await asyncio.to_thread(placement_group_table, self._groups[pool])
        nodes = table["bundles_to_node_id"]
        by_slot = {slot: nodes.get(slot // spec.slots_per_node, "") for slot in range(spec.slots)}
        for (name, slot), group in list(self._added.items()):
            if name == pool:
                by_slot[slot] = (await asyncio.to_thread(placement_group_table, group))["bundles_to_node_id"].get(0, "")
        return {slot: str(node) for slot, node in by_slot.items() if node}

    async def ask_nodes(self, function: Callable[[Any], Any], argument: Any) -> list[tuple[str, Any]]:
        """Calls a function in a process on each node of the pools: the address of each, and its answer.

        The wait for a node ends with its answer, or once the node is lost. Raises ProcessLost.
        """
        used = {node for pool in self.specs for node in (await self.nodes(pool)).values()}
        nodes = [node for node in ray.nodes() if node["NodeID"] in used]
        remote = ray.remote(num_cpus=0, max_retries=0)(function)
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        refs: list[Any] = [remote.options(scheduling_strategy=place).remote(argument) for place in places]
        with raised_as(ProcessLost, f"a node did not answer {function.__name__}", of=RayError):
            answers = await asyncio.gather(*(asyncio.wrap_future(ref.future()) for ref in refs))
        return [(node["NodeManagerAddress"], answer) for node, answer in zip(nodes, answers, strict=True)]

    async def living_slots(self, pool: str) -> list[int]:
        """The initial slots of a pool on nodes that Ray does not know to be lost, ascending.

        Ray moves the slots of a lost node to the next node that joins and has room for them.
        """
        spec = self.specs[pool]
        table = await asyncio.to_thread(placement_group_table, self._groups[pool])
        nodes = table["bundles_to_node_id"]
        return [slot for slot in range(spec.slots) if nodes[slot // spec.slots_per_node]]

    def _place(self, pool: str, slot: int) -> tuple[PlacementGroup, int]:
        """The placement group of a slot, and its bundle there."""
        if (group := self._added.get((pool, slot))) is not None:
            return group, 0
        spec = self.specs[pool]
        return (self._groups[spec.within], 0) if spec.within else (self._groups[pool], slot // spec.slots_per_node)

    def options(self, pool: str, slot: int) -> dict[str, Any]:
        """Ray options for the process of a slot, with its devices."""
        spec = self.specs[pool]
        group, bundle = self._place(pool, slot)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        devices = {"num_gpus": spec.devices_reserved} if self._kind == "cuda" else {}
        return {"scheduling_strategy": strategy, "num_cpus": spec.devices_reserved, **devices}

    def slot_on_node(self, pool: str, node: int) -> int:
        """A slot on a node of the pool; nodes are counted around from 0."""
        spec = self.specs[pool]
        return node % spec.nodes * spec.slots_per_node

    def same_node_options(self, pool: str, slot: int) -> dict[str, Any]:
        """Ray options for a process that reserves no device, on the node of a slot."""
        return self.options(pool, slot) | {"num_cpus": 0, "num_gpus": 0}

    async def kill_unresponsive(self, pool: str, actor: type, pids: Mapping[int, int], timeout: float) -> None:
        """Kills the processes of actors of this class that may no longer respond to Ray; `pids` are by slot.

        A stopped process responds to nothing and keeps its device. The kill comes from a task on the process's own
        node, because a process id is valid only there. Returns once none is left, or logs those that remain after
        `timeout` seconds.
        """
        kill = ray.remote(max_retries=0)(kill_process)
        refs: list[Any] = [
            kill.options(**self.same_node_options(pool, slot)).remote(pid, actor.__name__) for slot, pid in pids.items()
        ]
        kills = [asyncio.wrap_future(ref.future()) for ref in refs]
        if not kills:
            return
        done, late = await asyncio.wait(kills, timeout=timeout)
        for task in late:
            task.cancel()
        failures = [task.exception() for task in done if task.exception()]
        if late or failures:
            log.warning("%d %s processes may still be alive: %s", len(late) + len(failures), pool, failures[:1])

    def remove(self) -> None:
        """Removes all placement groups, and the agents."""
        self._agents.close()
        for group in (*self._groups.values(), *self._added.values()):
            remove_placement_group(group)
        self._groups.clear()
        self._added.clear()


def _devices(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources[name] for name in ("GPU", "CPU") if name in resources}
