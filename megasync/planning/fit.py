"""Finds what does not fit into the devices' memory, and the nearest configuration that does.

The search goes through other parallel splits, token budgets and server pools by their distance from the configuration,
and takes the first one that fits with room to spare and passes `check_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import log2

from megasync.config.changes import changes
from megasync.config.limits import as_typed
from megasync.config.pools import frozen_models, nodes_needed, pool_specs
from megasync.config.schema import Config, RolloutConfig, TrainerConfig
from megasync.errors import ConfigError
from megasync.planning.memory import (
    RankMemory,
    ServerMemory,
    free_for_servers,
    longest_sequence,
    server_memory,
    stage_memory,
)
from megasync.preflight.check import check_config, model_layout

# Fraction of a device's memory that a proposed configuration may fill: activations are estimates, and CUDA, NCCL and
# fragmentation take memory too.
FILL = 0.9
# The number of trainer devices is multiplied by at most this.
MOST_DEVICES = 64
# Divisors of the token budget that are tried.
BUDGETS = (1, 2, 4, 8, 16)
MEM_FRACTIONS = (0.85, 0.9)


def rank_refusals(stages: tuple[RankMemory, ...], device_bytes: int, server: ServerMemory | None = None) -> list[str]:
    """The pipeline stages whose ranks do not fit. ``server`` is one on the same device."""
    room = device_bytes - (server.total if server is not None else 0)
    beside = f" beside a server of {server.total / 1e9:.1f} GB" if server is not None else ""
    return [
        f"pipeline stage {stage} needs about {memory.total / 1e9:.0f} GB a rank, more than a device's "
        f"{device_bytes / 1e9:.0f} GB{beside}; raise trainer.tensor_parallel, pipeline_parallel or "
        f"data_parallel, set trainer.recompute=full, lower trainer.tokens_per_microbatch, or raise "
        f"trainer.optimizer.offload"
        for stage, memory in enumerate(stages)
        if memory.total > room
    ]


def refusals(
    config: Config,
    stages: tuple[RankMemory, ...],
    server: ServerMemory,
    frozen: Mapping[str, ServerMemory],
    device_bytes: int,
) -> tuple[str, ...]:
    """The sizes that do not fit, with the keys that determine them."""
    texts = rank_refusals(stages, device_bytes, server if config.cluster.share_device else None)
    if not _server_fits(config, server):
        texts.append(
            f"a server's KV cache holds {server.kv_tokens} tokens, less than one longest sequence "
            f"({longest_sequence(config)}); raise rollout.tensor_parallel or rollout.mem_fraction"
        )
    if not _arena_fits(config.rollout, server, device_bytes):
        texts.append(
            f"sync.arena=device takes {server.arena / 1e9:.1f} GB beside rollout.mem_fraction="
            f"{config.rollout.mem_fraction:g} of {device_bytes / 1e9:.0f} GB; set sync.arena=host, or lower "
            "mem_fraction"
        )
    for key, memory in frozen.items():
        if memory.kv_tokens == 0:
            texts.append(
                f"{key}.mem_fraction={frozen_models(config)[key].mem_fraction:g} leaves no room beside weights of "
                f"{memory.weights / 1e9:.1f} GB a rank; raise {key}.mem_fraction or {key}.tensor_parallel"
            )
    return tuple(texts)


def context_needed(config: Config, bucket: int, device_bytes: int) -> str | None:
    """The context-parallel size that the longest sequence needs, in words, if everything else stays as it is.

    None if one alone fits in a microbatch already, or if no size is enough. `bucket` is as in `nearest_fit`.
    """
    now, longest = config.trainer, longest_sequence(config)
    for more in (2**power for power in range(int(log2(MOST_DEVICES)) + 1)):
        context = now.context_parallel * more
        budget = min(now.tokens_per_microbatch, -(-longest // context))
        trainer = replace(now, context_parallel=context, tokens_per_microbatch=budget)
        if not _split_fits(config, trainer, bucket, device_bytes):
            continue
        if more == 1:
            return None
        return (
            f"the longest sequence ({longest} tokens) needs trainer.context_parallel={context} with "
            f"tokens_per_microbatch={budget}, on {more} times as many ranks"
        )
    return None


def nearest_fit(config: Config, bucket: int, device_bytes: int) -> tuple[str, ...] | None:
    """Overrides, such as `trainer.tensor_parallel=8`, with which everything fits; None if no candidate does.

    `bucket` is the largest message of a weight sync, in bytes. Frozen models are not changed.
    """
    now = config.trainer
    layout, _ = model_layout(config, planning=True)
    stages = [stage_memory(config, layout, bucket, stage) for stage in range(now.pipeline_parallel)]
    free = free_for_servers(config, stages, device_bytes) or 0
    servers = [fleet for fleet in _server_pools(config) if _servers_fit(config, *fleet, free)]
    if not servers:
        return None
    for trainer in _splits(config):
        if not _split_fits(config, trainer, bucket, device_bytes):
            continue
        for rollout, arena in servers:
            sync = replace(config.sync, arena=arena)
            if (fitting := _admitted(replace(config, trainer=trainer, rollout=rollout, sync=sync))) is not None:
                return tuple(f"{key}={as_typed(value)}" for key, _, value in changes(config, fitting))
    return None


def _splits(config: Config) -> Iterator[TrainerConfig]:
    """Trainer configurations by their distance from the given one.

    Doubling one dimension, recomputing, and halving the token budget are one step each, with weights: pipeline stages
    cost bubbles, and more devices cost most.
    """
    now, per_node = config.trainer, config.cluster.devices_per_node
    world = now.tensor_parallel * now.pipeline_parallel * now.data_parallel
    doublings = [2**power for power in range(int(log2(MOST_DEVICES)) + 1)]
    tensors = sorted({now.tensor_parallel, *(size for size in doublings if per_node % size == 0)})
    pipelines = sorted({now.pipeline_parallel, *doublings})
    # A budget below the longest sequence has no effect.
    least = min(longest_sequence(config), now.tokens_per_microbatch)
    budgets = sorted({least, *(max(least, now.tokens_per_microbatch // part) for part in BUDGETS)}, reverse=True)
    recomputes = list(dict.fromkeys((now.recompute, "full")))
    optimizers = sorted({now.distributed_optimizer, True}, key=lambda spread: spread != now.distributed_optimizer)
    ranked = []
    for more, tensor, pipeline, budget, recompute, spread in product(
        doublings, tensors, pipelines, budgets, recomputes, optimizers
    ):
        data, rest = divmod(world * more, tensor * pipeline)
        if rest or data == 0:
            continue
        cost = (
            _steps(tensor, now.tensor_parallel)
            + 1.5 * _steps(pipeline, now.pipeline_parallel)
            + 0.5 * _steps(data, now.data_parallel)
            + 3.0 * _steps(more, 1)
            + _steps(budget, now.tokens_per_microbatch)
            + (recompute != now.recompute)
            + 0.5 * (spread != now.distributed_optimizer)
        )
        split = replace(
            now,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=data,
            sequence_parallel=tensor > 1 and (now.sequence_parallel or now.tensor_parallel == 1),
            tokens_per_microbatch=budget,
            recompute=recompute,
            recompute_layers=now.recompute_layers if recompute == now.recompute else None,
            recompute_modules=now.recompute_modules if recompute == now.recompute else [],
            overlap_grad_reduce=now.overlap_grad_reduce and data > 1,
            overlap_param_gather=now.overlap_param_gather and data > 1,
            distributed_optimizer=spread,
        )
        ranked.append((cost, len(ranked), split))
    return (split for _, _, split in sorted(ranked, key=lambda entry: entry[:2]))


def _steps(size: int, now: int) -> float:
    return abs(log2(size / now))


def _split_fits(config: Config, trainer: TrainerConfig, bucket: int, device_bytes: int) -> bool:
    candidate = replace(config, trainer=trainer)
    try:
        pool_specs(candidate)
        layout, _ = model_layout(candidate, planning=True)
    except ConfigError:
        return False
    stages = [stage_memory(candidate, layout, bucket, stage) for stage in range(trainer.pipeline_parallel)]
    server = server_memory(candidate, layout, free_for_servers(candidate, stages, device_bytes))
    room = device_bytes - (server.total if config.cluster.share_device else 0)
    # The given split may fill the device completely.
    limit = room if trainer == config.trainer else FILL * room
    return all(memory.total <= limit for memory in stages)


def _server_pools(config: Config) -> Iterator[tuple[RolloutConfig, str]]:
    """Server configurations, each with the place of its staging area, by their distance from the given ones.

    First more memory per server, then wider servers on the same number of devices.
    """
    now, per_node = config.rollout, config.cluster.devices_per_node
    widths = [now.tensor_parallel * 2**power for power in range(int(log2(per_node)) + 1)]
    fractions = [now.mem_fraction, *(share for share in MEM_FRACTIONS if share > now.mem_fraction)]
    arenas = [config.sync.arena, *({"host"} - {config.sync.arena})]
    for width, fraction, arena in product(
        [w for w in widths if w * now.pipeline_parallel <= per_node], fractions, arenas
    ):
        servers = max(1, now.servers * now.tensor_parallel // width)
        fleet = replace(
            now,
            tensor_parallel=width,
            servers=servers,
            min_servers=min(now.min_servers, servers),
            mem_fraction=fraction,
        )
        yield fleet, arena


def _servers_fit(config: Config, rollout: RolloutConfig, arena: str, device_bytes: int) -> bool:
    candidate = replace(config, rollout=rollout, sync=replace(config.sync, arena=arena))
    layout, _ = model_layout(candidate, planning=True)
    memory = server_memory(candidate, layout, device_bytes)
    return _server_fits(candidate, memory) and _arena_fits(rollout, memory, device_bytes)


def _server_fits(config: Config, server: ServerMemory) -> bool:
    return bool(config.rollout.external) or server.kv_tokens >= longest_sequence(config)


def _arena_fits(rollout: RolloutConfig, server: ServerMemory, device_bytes: int) -> bool:
    return bool(rollout.external) or server.arena <= (1 - rollout.mem_fraction) * device_bytes


def _admitted(config: Config) -> Config | None:
    """The configuration, joined to a cluster if it needs several nodes; None if `check_config` refuses it."""
    try:
        if nodes_needed(pool_specs(config), config.cluster.devices_per_node) > 1:
            cluster = replace(config.cluster, address=config.cluster.address or "auto", host="auto")
            config = replace(config, cluster=cluster)
        check_config(config, planning=True)
    except ConfigError:
        return None
    return config
