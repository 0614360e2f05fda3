"""The resolved plan of a configuration: who runs where, what moves, how stale it may get, what memory it takes.

`resolve_plan` is a pure function of the configuration and the model's config.json; it starts nothing and looks at no
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
class Pool:
    """A pool, and the cluster nodes (counted from 0) that it takes."""

    spec: PoolSpec
    nodes: tuple[int, ...]

    def node_of(self, slot: int) -> int:
        return self.nodes[slot // self.spec.slots_per_node]


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A reward model's servers: in a pool of their own, or beside the first servers of the rollout pool."""

    name: str
    kind: str
    path: str
    pool: Pool
    shared: bool
    memory: ServerMemory | None


@dataclass(frozen=True, slots=True)
class Rank:
    """A trainer rank: its node, its coordinates, and the global layers of its pipeline stage (one range per chunk)."""

    rank: int
    node: int
    coords: Coords
    # Its place among the experts; None for a model without any.
    experts: ExpertCoords | None
    layers: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Sync:
    """One weight sync: full weights in bytes. Where whole tensors go, as by broadcast, they are so many messages of at
    most `largest` bytes from these ranks."""

    transport: str
    nbytes: int
    buckets: int
    largest: int
    senders: tuple[int, ...]
    every_steps: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """What becomes of servers that die: the run goes on with `least` of them, each starts again so often in a window."""

    least: int
    restarts: int
    window: float
    # Tokens of a running request that are lost with its server; None for all of them.
    lost_tokens: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    name: str
    model: str
    dtype: str
    parameters: int
    sizes: Sizes
    nodes: int
    access: str
    trainer: Pool
    rollout: Pool
    reward_models: tuple[RewardModel, ...]
    ranks: tuple[Rank, ...]
    # Responses in one training step, and tokens of one microbatch at most.
    responses_per_step: int
    microbatch_tokens: int
    # Groups that may be active at once, and of those being generated at once.
    capacity: int
    inflight: int
    # Versions that a trained token may be behind: max_staleness, and what the window adds. Beyond: `stale`.
    staleness_bound: int
    window_slack: int
    stale: str
    sync: Sync
    fleet: Fleet
    stages: tuple[RankMemory, ...]
    server: ServerMemory
    device_bytes: int | None
    devices_per_node: int
    warnings: tuple[str, ...]
    # What cannot fit, and then the overrides that bring the nearest configuration that does; None where none was found.
    refusals: tuple[str, ...]
    nearest: tuple[str, ...] | None


def resolve_plan(config: Config, device_bytes: int | None = None) -> Plan:
    """The plan of a checked configuration.

    `device_bytes` is the memory of one GPU, 80 GB when not given; a run on `cluster.device=cpu` has no such limit.
    Raises ConfigError as `check_config` does, and for a device's memory where there is no device.
    """
    layout, source = model_layout(config, planning=True)
    topology = layout.topology
    schedule = config.schedule
    if config.cluster.device == "cpu" and device_bytes is not None:
        raise ConfigError("--device-memory is of one GPU, but cluster.device=cpu; leave one of them out")
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
        fleet=Fleet(
            least=config.rollout.min_servers,
            restarts=config.rollout.health.restarts,
            window=config.rollout.health.restart_window,
            lost_tokens=config.rollout.stream_interval or None,
        ),
        sync=Sync(
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


def _place(config: Config) -> tuple[int, dict[str, Pool]]:
    """The pools on numbered nodes: on one together where they fit, else one pool's nodes after the other's."""
    specs = pool_specs(config)
    nodes = nodes_needed(specs, config.cluster.devices_per_node)
    first, pools = 0, {}
    for name, spec in specs.items():
        pools[name] = Pool(spec, tuple(range(first, first + spec.nodes)))
        first += 0 if nodes == 1 else spec.nodes
    return nodes, pools


def _reward_model(config: Config, name: str, pools: dict[str, Pool], device_bytes: int | None) -> RewardModel:
    model = config.reward_models[name]
    shared = model.pool == "rollout"
    pool = pools["rollout" if shared else reward_pool(name)]
    if shared:
        spec = replace(pool.spec, slots=model.servers, devices=model.tensor_parallel)
        pool = Pool(spec, pool.nodes[: spec.nodes])
    memory = reward_memory(f"reward_models.{name}", model, config.model.dtype, device_bytes)
    return RewardModel(name, model.kind, model.path, pool, shared, memory)


def _rank(rank: int, pool: Pool, layout: Layout) -> Rank:
    coords = layout.topology.coords(rank)
    experts = layout.topology.expert_coords(rank) if layout.sizes.experts else None
    return Rank(rank, pool.node_of(rank), coords, experts, tuple(layout.stages[coords.pp]))


def _model_name(config: Config, source: Path) -> str:
    folder = Path(config.model.path)
    return config.model.path if source.parent == folder.expanduser() else f"{config.model.path} (sizes from {source})"


def _warnings(config: Config) -> tuple[str, ...]:
    longest, budget = longest_sequence(config), config.trainer.tokens_per_microbatch
    if longest <= budget:
        return ()
    words = f"the longest sequence ({longest} tokens) exceeds trainer.tokens_per_microbatch={budget}"
    return (f"{words}; such a sequence gets a microbatch of its own",)
