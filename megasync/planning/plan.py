"""The resolved plan of a configuration: placement, weight sync, staleness bound and memory.

`resolve_plan` is a pure function of the configuration and the model's config.json. It starts nothing and queries no
device, so the plan of a cluster can be read on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from megasync.config.commands import is_served, is_supervised, supervised_config
from megasync.config.pacing import Pacing
from megasync.config.pools import PoolSpec, frozen_models, frozen_pool, nodes_needed, pool_specs, trainer_pool
from megasync.config.schema import Config, RewardModelConfig
from megasync.errors import ConfigError
from megasync.layout.adapter import AdapterLayout, adapter_layout
from megasync.layout.layout import Layout
from megasync.layout.topology import Coords, ExpertCoords, Topology
from megasync.planning.fit import context_needed, nearest_fit, rank_refusals, refusals
from megasync.planning.memory import (
    HostMemory,
    RankMemory,
    ServerMemory,
    free_for_servers,
    frozen_memory,
    host_memory,
    longest_sequence,
    server_memory,
    stage_memory,
    trained_adapters,
)
from megasync.preflight.check import model_layout
from megasync.sync.broadcast.plan import BroadcastPlan, plan_broadcast
from megasync.tenants.checks import served_config, served_context

DEFAULT_DEVICE_BYTES = 80 * 10**9
# What a frozen model is that no key tells.
KINDS = {"auxiliary_models": "auxiliary", "teachers": "teacher"}


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A pool and the cluster nodes, counted from 0, that it occupies."""

    spec: PoolSpec
    nodes: tuple[int, ...]

    def node_of(self, slot: int) -> int:
        return self.nodes[slot // self.spec.slots_per_node]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A frozen model's servers: in their own pool, or on the devices of the first servers of the rollout pool."""

    key: str
    kind: str
    path: str
    pool: PlannedPool
    shared: bool
    memory: ServerMemory | None

    @property
    def name(self) -> str:
        return self.key.partition(".")[2]


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """A trainer rank: its node, its coordinates, and the global layers of its pipeline stage (one range per chunk)."""

    rank: int
    node: int
    coords: Coords
    # Its coordinates among the expert ranks; None for a model without experts.
    experts: ExpertCoords | None
    layers: tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """The ranks that a configuration starts, and whether they fit into device memory: all of a supervised run."""

    config: Config
    layout: Layout
    # The config.json that the layout was computed from.
    source: Path
    # Number of cluster nodes.
    nodes: int
    trainer: PlannedPool
    ranks: tuple[PlannedRank, ...]
    # Memory of a trainer rank in each pipeline stage.
    stages: tuple[RankMemory, ...]
    host: HostMemory
    device_bytes: int | None
    # What does not fit.
    refusals: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(prod(shape) for shape in self.layout.hf_tensors.values())

    @property
    def adapters(self) -> AdapterLayout | None:
        """The adapters that are trained; None if all weights are."""
        return trained_adapters(self.config, self.layout)

    @property
    def warnings(self) -> tuple[str, ...]:
        trainer, longest = self.config.trainer, longest_sequence(self.config)
        budget, context = trainer.tokens_per_microbatch, trainer.context_parallel
        if longest <= budget * context:
            return ()
        shared = f" x trainer.context_parallel={context}" if context > 1 else ""
        return (
            f"the longest sequence ({longest} tokens) exceeds trainer.tokens_per_microbatch={budget}{shared}; such a "
            "sequence gets a microbatch of its own",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(TrainerPlan):
    """The processes that a configuration of reinforcement learning starts."""

    rollout: PlannedPool
    frozen_models: tuple[PlannedModel, ...]
    # The messages of a sync of the full weights, if they are sent as whole tensors.
    broadcast: BroadcastPlan
    # Memory of a server rank.
    server: ServerMemory
    # Overrides to the nearest configuration that fits; None if none was found.
    nearest: tuple[str, ...] | None

    @property
    def pacing(self) -> Pacing:
        return Pacing.of(self.config.schedule)

    @property
    def max_inflight(self) -> int:
        """Maximum number of groups in generation."""
        return self.config.schedule.max_inflight_groups or self.pacing.capacity

    @property
    def cpu_memory(self) -> dict[str, int]:
        """Bytes of each pool in the memory of a CPU's machine, by its key; empty for a run on GPUs."""
        if self.device_bytes is not None:
            return {}
        rollout = 0 if self.config.rollout.external else self.rollout.spec.slots * self.rollout.spec.devices
        pools = {
            "trainer": sum(self.stages[rank.coords.pp].total for rank in self.ranks),
            "rollout": self.server.total * rollout,
        }
        for model in self.frozen_models:
            if model.memory is not None:
                pools[model.key] = model.memory.total * model.pool.spec.slots * model.pool.spec.devices
        return {key: nbytes for key, nbytes in pools.items() if nbytes}

    @property
    def warnings(self) -> tuple[str, ...]:
        workers, most = self.config.rollout.workers, self.max_inflight
        idle = f"rollout.workers={workers} exceeds the {most} groups in generation: {workers - most} workers are idle"
        # `super` alone fails: a dataclass with slots is another class than the one that defines this.
        return (*super(Plan, self).warnings, *([idle] if workers > most else []))


def resolve_plan(config: Config, device_bytes: int | None = None) -> Plan:
    """The plan of a checked configuration.

    `device_bytes` is the memory of one GPU, by default 80 GB; a run on `cluster.device=cpu` has no such limit. Raises
    ConfigError as `check_config` does, and if `device_bytes` is given for a CPU run.
    """
    layout, source = model_layout(config, planning=True)
    device_bytes = _device_bytes(config, device_bytes)
    nodes, pools = _place(config, pool_specs(config))
    frozen = tuple(_frozen_model(config, key, pools, device_bytes) for key in frozen_models(config))
    synced = (adapter_layout(layout, config.trainer) if config.sync.transport == "adapters" else None) or layout
    broadcast = plan_broadcast(synced, config.sync.bucket_mb * 2**20, config.model.dtype)
    stages = range(layout.topology.pipeline)
    largest = [max(bucket.nbytes for bucket in broadcast.of_stage(stage)) for stage in stages]
    memory = tuple(stage_memory(config, layout, largest[stage], stage) for stage in stages)
    server = server_memory(config, layout, free_for_servers(config, memory, device_bytes))
    refused: tuple[str, ...] = ()
    nearest = None
    if device_bytes is not None:
        frozen_memories = {model.key: model.memory for model in frozen if model.memory is not None}
        refused = refusals(config, memory, server, frozen_memories, device_bytes)
        if refused:
            nearest = nearest_fit(config, max(largest), device_bytes)
            needed = context_needed(config, max(largest), device_bytes)
            refused += (needed,) if needed else ()
        elif (least := config.trainer.min_data_parallel) is not None:
            fewer = replace(config, trainer=replace(config.trainer, data_parallel=least))
            smallest = layout.on(Topology.from_config(fewer.trainer))
            beside = server if config.cluster.share_device else None
            memory_of_fewer = tuple(stage_memory(fewer, smallest, largest[stage], stage) for stage in stages)
            refused = tuple(
                f"with trainer.min_data_parallel={least} as data_parallel, {refusal}"
                for refusal in rank_refusals(memory_of_fewer, device_bytes, beside)
            )
    return Plan(
        config=config,
        layout=layout,
        source=source,
        nodes=nodes,
        trainer=pools["trainer"],
        rollout=pools["rollout"],
        frozen_models=frozen,
        ranks=tuple(_rank(rank, pools["trainer"], layout) for rank in range(layout.topology.world)),
        broadcast=broadcast,
        stages=memory,
        server=server,
        host=_host_memory(config, layout, nodes, pools),
        device_bytes=device_bytes,
        refusals=refused,
        nearest=nearest,
    )


def resolve(config: Config, device_bytes: int | None = None) -> TrainerPlan:
    """The plan of a checked configuration, of whatever command it is for."""
    if is_served(config):
        context = served_context(config, planning=True)
        return resolve_plan(served_config(config, context), device_bytes)
    return (resolve_supervised if is_supervised(config) else resolve_plan)(config, device_bytes)


def resolve_supervised(config: Config, device_bytes: int | None = None) -> TrainerPlan:
    """The plan of a supervised run. ``config`` passed `check_supervised`; the rest is as for `resolve_plan`.

    A row counts as one long response, of `sft.max_tokens` or as long as the model's context.
    """
    layout, source = model_layout(config, planning=True)
    device_bytes = _device_bytes(config, device_bytes)
    longest = config.sft.max_tokens or layout.hf_config["max_position_embeddings"]
    config = supervised_config(config)
    config = replace(
        config,
        data=replace(config.data, prompt=replace(config.data.prompt, max_tokens=0)),
        rollout=replace(config.rollout, sampling=replace(config.rollout.sampling, max_new_tokens=longest)),
    )
    nodes, pools = _place(config, {"trainer": trainer_pool(config)})
    stages = tuple(stage_memory(config, layout, 0, stage) for stage in range(layout.topology.pipeline))
    pool = pools["trainer"]
    return TrainerPlan(
        config=config,
        layout=layout,
        source=source,
        nodes=nodes,
        trainer=pool,
        ranks=tuple(_rank(rank, pool, layout) for rank in range(layout.topology.world)),
        stages=stages,
        host=host_memory(config, layout, min(pool.spec.slots, pool.spec.slots_per_node), 0),
        device_bytes=device_bytes,
        refusals=() if device_bytes is None else tuple(rank_refusals(stages, device_bytes)),
    )


def _device_bytes(config: Config, device_bytes: int | None) -> int | None:
    if config.cluster.device == "cpu":
        if device_bytes is not None:
            raise ConfigError("--device-memory is the memory of a GPU, but cluster.device=cpu; drop one of them")
        return None
    return DEFAULT_DEVICE_BYTES if device_bytes is None else device_bytes


def _host_memory(config: Config, layout: Layout, nodes: int, pools: dict[str, PlannedPool]) -> HostMemory:
    trainer, rollout = pools["trainer"].spec, pools["rollout"].spec
    ranks, servers = min(trainer.slots, trainer.slots_per_node), min(rollout.slots, rollout.slots_per_node)
    servers *= rollout.devices
    if nodes == 1:
        return host_memory(config, layout, ranks, servers)
    either = host_memory(config, layout, ranks, 0), host_memory(config, layout, 0, servers)
    return max(either, key=lambda memory: memory.total)


def _place(config: Config, specs: Mapping[str, PoolSpec]) -> tuple[int, dict[str, PlannedPool]]:
    """Assigns pools to numbered nodes: all to one node if they fit, else to consecutive nodes."""
    nodes = nodes_needed(specs, config.cluster.devices_per_node)
    first, pools = 0, {}
    for name, spec in specs.items():
        if spec.within:
            pools[name] = PlannedPool(spec, pools[spec.within].nodes)
            continue
        pools[name] = PlannedPool(spec, tuple(range(first, first + spec.nodes)))
        first += 0 if nodes == 1 else spec.nodes
    return nodes, pools


def _frozen_model(config: Config, key: str, pools: dict[str, PlannedPool], device_bytes: int | None) -> PlannedModel:
    model = frozen_models(config)[key]
    shared = model.pool == "rollout"
    pool = pools["rollout" if shared else frozen_pool(key)]
    if shared:
        spec = replace(pool.spec, slots=model.servers, devices=model.tensor_parallel)
        pool = PlannedPool(spec, pool.nodes[: spec.nodes])
    memory = frozen_memory(key, model, config, device_bytes)
    kind = model.kind if isinstance(model, RewardModelConfig) else KINDS[key.partition(".")[0]]
    return PlannedModel(key, kind, model.path, pool, shared, memory)


def _rank(rank: int, pool: PlannedPool, layout: Layout) -> PlannedRank:
    coords = layout.topology.coords(rank)
    experts = layout.topology.expert_coords(rank) if layout.sizes.experts else None
    return PlannedRank(rank, pool.node_of(rank), coords, experts, tuple(layout.stages[coords.pp]))
