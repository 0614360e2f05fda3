"""The resolved plan of a configuration: placement, weight sync, staleness bound and memory.

`resolve_plan` is a pure function of the configuration and the model's config.json. It starts nothing and queries no
device, so the plan of a cluster can be read on a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from megasync.config.access import describe_access
from megasync.config.pacing import Pacing
from megasync.config.pools import PoolSpec, nodes_needed, pool_specs, reward_pool
from megasync.config.schema import Config
from megasync.errors import ConfigError
from megasync.layout.families import Sizes
from megasync.layout.layout import Layout
from megasync.layout.topology import Coords, ExpertCoords
from megasync.preflight.check import model_layout
from megasync.preflight.fit import nearest_fit, refusals
from megasync.preflight.memory import (
    RankMemory,
    ServerMemory,
    longest_sequence,
    microbatch_tokens,
    reward_memory,
    server_memory,
    stage_memory,
)
from megasync.sync.broadcast.plan import plan_broadcast

DEFAULT_DEVICE_BYTES = 80 * 10**9


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A pool and the cluster nodes, counted from 0, that it occupies."""

    spec: PoolSpec
    nodes: tuple[int, ...]

    def node_of(self, slot: int) -> int:
        return self.nodes[slot // self.spec.slots_per_node]


@dataclass(frozen=True, slots=True)
class PlannedRewardModel:
    """A reward model's servers: in their own pool, or on the devices of the first servers of the rollout pool."""

    name: str
    kind: str
    path: str
    pool: PlannedPool
    shared: bool
    memory: ServerMemory | None


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """A trainer rank: its node, its coordinates, and the global layers of its pipeline stage (one range per chunk)."""

    rank: int
    node: int
    coords: Coords
    # Its coordinates among the expert ranks; None for a model without experts.
    experts: ExpertCoords | None
    layers: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """One sync of the full weights, in bytes.

    Transports of whole tensors, such as broadcast, send `buckets` messages of at most `largest` bytes from `senders`.
    """

    transport: str
    nbytes: int
    buckets: int
    largest: int
    senders: tuple[int, ...]
    every_steps: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """How the run handles dead servers: it continues with at least `least`, and restarts each `restarts` times a
    window.
    """

    least: int
    restarts: int
    window: float
    # Tokens of a running request that are lost when its server dies; None for all of them.
    lost_tokens: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `megasync plan` shows: pools, ranks, buffer, sync, memory, and whether it fits."""

    name: str
    model: str
    dtype: str
    parameters: int
    sizes: Sizes
    nodes: int
    access: str
    trainer: PlannedPool
    rollout: PlannedPool
    reward_models: tuple[PlannedRewardModel, ...]
    ranks: tuple[PlannedRank, ...]
    # Responses per training step, and the maximum number of tokens per microbatch.
    responses_per_step: int
    microbatch_tokens: int
    # Maximum number of active groups, and of groups in generation.
    capacity: int
    inflight: int
    # Maximum staleness in versions, the part of it due to the look-ahead window, and what happens to staler groups.
    staleness_bound: int
    window_slack: int
    stale: str
    sync: SyncPlan
    fleet: FleetPlan
    stages: tuple[RankMemory, ...]
    server: ServerMemory
    device_bytes: int | None
    devices_per_node: int
    warnings: tuple[str, ...]
    # What does not fit, and overrides to the nearest configuration that does; None if none was found.
    refusals: tuple[str, ...]
    nearest: tuple[str, ...] | None


def resolve_plan(config: Config, device_bytes: int | None = None) -> Plan:
    """The plan of a checked configuration.

    `device_bytes` is the memory of one GPU, by default 80 GB; a run on `cluster.device=cpu` has no such limit. Raises
    ConfigError as `check_config` does, and if `device_bytes` is given for a CPU run.
    """
    layout, source = model_layout(config, planning=True)
    topology = layout.topology
    schedule = config.schedule
    if config.cluster.device == "cpu" and device_bytes is not None:
        raise ConfigError("--device-memory is the memory of a GPU, but cluster.device=cpu; drop one of them")
    if config.cluster.device != "cpu" and device_bytes is None:
        device_bytes = DEFAULT_DEVICE_BYTES
    nodes, pools = _place(config)
    trainer, rollout = pools["trainer"], pools["rollout"]
    reward_models = tuple(_reward_model(config, name, pools, device_bytes) for name in config.reward_models)
    buckets = plan_broadcast(layout, config.sync.bucket_mb * 2**20, config.model.dtype)
    largest = [max(bucket.nbytes for bucket in buckets.of_stage(stage)) for stage in range(topology.pipeline)]
    stages = tuple(stage_memory(config, layout, size, stage) for stage, size in enumerate(largest))
    server = server_memory(config, layout, device_bytes)
    judged = {model.name: model.memory for model in reward_models if model.memory is not None}
    refused = refusals(config, stages, server, judged, device_bytes)
    pacing = Pacing.of(schedule)
    return Plan(
        name=config.name,
        model=_model_name(config, source),
        dtype=config.model.dtype,
        parameters=sum(prod(shape) for shape in layout.hf_tensors.values()),
        sizes=layout.sizes,
        nodes=nodes,
        access=describe_access(config.cluster),
        trainer=trainer,
        rollout=rollout,
        reward_models=reward_models,
        ranks=tuple(_rank(rank, trainer, layout) for rank in range(topology.world)),
        responses_per_step=schedule.groups_per_step * schedule.samples_per_group,
        microbatch_tokens=microbatch_tokens(config),
        capacity=pacing.capacity,
        inflight=schedule.max_inflight_groups or pacing.capacity,
        staleness_bound=pacing.staleness_bound,
        window_slack=pacing.window_slack,
        stale=schedule.stale,
        fleet=FleetPlan(
            least=config.rollout.min_servers,
            restarts=config.rollout.health.restarts,
            window=config.rollout.health.restart_window,
            lost_tokens=config.rollout.stream_interval or None,
        ),
        sync=SyncPlan(
            transport=config.sync.transport,
            nbytes=buckets.nbytes,
            buckets=len(buckets.buckets),
            largest=max(largest),
            senders=buckets.senders,
            every_steps=schedule.weight_sync_steps,
        ),
        stages=stages,
        server=server,
        device_bytes=device_bytes,
        devices_per_node=config.cluster.devices_per_node,
        warnings=_warnings(config),
        refusals=refused,
        nearest=nearest_fit(config, max(largest), device_bytes) if refused else None,
    )


def _place(config: Config) -> tuple[int, dict[str, PlannedPool]]:
    """Assigns pools to numbered nodes: all to one node if they fit, else to consecutive nodes."""
    specs = pool_specs(config)
    nodes = nodes_needed(specs, config.cluster.devices_per_node)
    first, pools = 0, {}
    for name, spec in specs.items():
        pools[name] = PlannedPool(spec, tuple(range(first, first + spec.nodes)))
        first += 0 if nodes == 1 else spec.nodes
    return nodes, pools


def _reward_model(
    config: Config, name: str, pools: dict[str, PlannedPool], device_bytes: int | None
) -> PlannedRewardModel:
    model = config.reward_models[name]
    shared = model.pool == "rollout"
    pool = pools["rollout" if shared else reward_pool(name)]
    if shared:
        spec = replace(pool.spec, slots=model.servers, devices=model.tensor_parallel)
        pool = PlannedPool(spec, pool.nodes[: spec.nodes])
    memory = reward_memory(f"reward_models.{name}", model, config.model.dtype, device_bytes)
    return PlannedRewardModel(name, model.kind, model.path, pool, shared, memory)


def _rank(rank: int, pool: PlannedPool, layout: Layout) -> PlannedRank:
    coords = layout.topology.coords(rank)
    experts = layout.topology.expert_coords(rank) if layout.sizes.experts else None
    return PlannedRank(rank, pool.node_of(rank), coords, experts, tuple(layout.stages[coords.pp]))


def _model_name(config: Config, source: Path) -> str:
    folder = Path(config.model.path)
    return config.model.path if source.parent == folder.expanduser() else f"{config.model.path} (sizes from {source})"


def _warnings(config: Config) -> tuple[str, ...]:
    longest, budget = longest_sequence(config), config.trainer.tokens_per_microbatch
    if longest <= budget:
        return ()
    words = f"the longest sequence ({longest} tokens) exceeds trainer.tokens_per_microbatch={budget}"
    return (f"{words}; such a sequence gets a microbatch of its own",)
