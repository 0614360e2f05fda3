"""Checks that weights get from a trainer topology into an engine and back, without trainer, server or GPU.

Invalid input is refused before the engine's layout is traced, which takes a process and several seconds.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path

import torch

from megasync.errors import ConfigError
from megasync.lab.transfer_check import Problem, check_transfer
from megasync.layout.block_fp8 import Block
from megasync.layout.engine_layout import EngineRank
from megasync.layout.layout import Box, Layout
from megasync.layout.model_files import read_hf_config, read_storage
from megasync.layout.quantized import QuantizedLayout, linear_matrices
from megasync.layout.shards import HfFolder, Read, box_of
from megasync.layout.topology import Topology
from megasync.sync.broadcast.plan import ITEM_BYTES
from megasync.sync.shard.plan import ShardPlan, plan_shards

SEED = 0
# Random tensors that are cached: those of one fused parameter are read in turn.
KEPT_TENSORS = 4

Specs = Sequence[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class TrainerUse:
    """The bytes that a trainer rank holds (including vocabulary padding), and sends per version and engine."""

    rank: int
    tp: int
    dp: int
    pp: int
    held_bytes: int
    sent_bytes: int
    buckets: int


@dataclass(frozen=True)
class EngineUse:
    """The bytes that an engine rank receives per version; `arena_bytes` is its staging area."""

    rank: int
    received_bytes: int
    buckets: int
    arena_bytes: int


@dataclass(frozen=True)
class ReplicaGroup:
    """Trainer ranks that are data-parallel replicas, and the fewest and most bytes that one of them sends."""

    ranks: tuple[int, ...]
    smallest_bytes: int
    largest_bytes: int


@dataclass(frozen=True)
class Report:
    """The outcome of a check."""

    model: str
    tensors: int
    parameters: int
    dtype: str
    trainer: tuple[TrainerUse, ...]
    engine: tuple[EngineUse, ...]
    wire_bytes: int
    # Bytes that the engine's ranks keep.
    minimum_bytes: int
    # The two message buffers of a sending rank.
    sender_bytes: int
    replica_groups: tuple[ReplicaGroup, ...]
    # Tensors by `"from -> to"` dtype.
    casts: Mapping[str, tuple[str, ...]]
    # Elements filled with each value, by parameter.
    constants: Mapping[str, Mapping[str, int]]
    # Tensors of a vision tower.
    frozen: int
    # Elements that loading does not write, by parameter.
    untouched: Mapping[str, int]
    problems: tuple[Problem, ...]
    # The most memory that the check's own tensors took.
    peak_bytes: int

    @property
    def ratio(self) -> float:
        return self.wire_bytes / self.minimum_bytes

    @property
    def offenders(self) -> tuple[str, ...]:
        """Names of the tensors with problems, each once."""
        return tuple(dict.fromkeys(problem.tensor for problem in self.problems))

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.problems:
            return f"FAILED: {len(self.problems)} problem(s) with {', '.join(self.offenders)}"
        return (
            f"OK: {self.tensors} tensors ({self.parameters:,} parameters, {self.dtype}) go from {len(self.trainer)} "
            f"trainer rank(s) into {len(self.engine)} engine rank(s), and back from both, bit for bit"
        )


def check_layout(
    model: Path,
    topology: Topology,
    spec: str,
    dtype: str | None,
    bucket_mb: int,
    random: bool,
    engine_ranks: Callable[[str, Specs], list[EngineRank]],
    fp8: bool = False,
) -> Report:
    """Checks a Hugging Face folder on a trainer topology.

    Args:
        spec: "local" or "te", the flavour of Megatron's layers.
        dtype: of trainer and engine; None takes that of config.json.
        bucket_mb: largest message, in MiB.
        random: use random weights; the folder needs only a config.json.
        engine_ranks: returns what each engine rank keeps, given a dtype and the checkpoint's names and shapes.
        fp8: the engine keeps the model in the block FP8 of its config.json. Values and scales are random.

    Raises:
        ConfigError, CheckpointError: a folder, model, topology or dtype that cannot be used; nothing was started.
        SyncError: trainer and engine do not hold the same tensors.

    """
    config = read_hf_config(model)
    dtype = _dtype(dtype, config)
    plain = layout = Layout(config, topology, spec)
    if fp8:
        layout = _in_fp8(plain, model)
    with _weights(model, layout, random or fp8) as read:
        specs = [*layout.hf_tensors.items(), *layout.frozen_tensors.items()]
        engine = [rank.without(layout.frozen_tensors) for rank in engine_ranks(dtype, specs)]
        plan = plan_shards(layout, engine, bucket_mb * 2**20, dtype)
        outcome = check_transfer(layout, engine, plan, read, dtype)
    return Report(
        model=str(model),
        tensors=len(layout.hf_tensors),
        parameters=sum(map(prod, plain.hf_tensors.values())),
        dtype=dtype,
        trainer=_trainer_uses(plain, plan, dtype),
        engine=_engine_uses(plan),
        wire_bytes=plan.nbytes,
        minimum_bytes=_minimum(layout, engine, dtype),
        sender_bytes=2 * plan.largest_packed,
        replica_groups=_replica_groups(topology, plan),
        casts=_casts(layout, engine, dtype),
        constants=_constants(engine),
        frozen=len(layout.frozen_tensors),
        untouched=dict(outcome.untouched),
        problems=tuple(outcome.problems),
        peak_bytes=outcome.peak_bytes,
    )


def _in_fp8(layout: Layout, model: Path) -> QuantizedLayout:
    """The layout with the matrices in block FP8 that config.json says; raises ConfigError if it says none."""
    block = read_storage(model)
    if not isinstance(block, Block):
        raise ConfigError(f"--fp8 needs a model in block FP8, which the config.json in {model} does not state")
    stated = json.loads((model / "config.json").read_text())["quantization_config"]
    plain = stated.get("modules_to_not_convert") or stated.get("ignored_layers") or ()
    names = {name for name in linear_matrices(layout, block) if not any(module in name for module in plain)}
    return QuantizedLayout(layout, block, names)


def _dtype(dtype: str | None, config: Mapping[str, object]) -> str:
    dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not supported; set --dtype to one of {', '.join(ITEM_BYTES)}")
    return dtype


# Weights


@contextmanager
def _weights(model: Path, layout: Layout, random: bool) -> Iterator[Read]:
    """A reader of boxes of the tensors, after checking that each exists with the right shape."""
    if random:
        yield random_weights(layout.hf_tensors)
        return
    if not any(model.glob("*.safetensors")):
        raise ConfigError(f"{model} has no *.safetensors weights; add them, or use --random for random weights")
    with HfFolder(model) as folder:
        for name, shape in layout.hf_tensors.items():
            folder.reader(name, shape)
        yield folder.reading(layout.hf_tensors)


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> Read:
    """A reader of boxes of random float32 tensors, the same at every read."""

    @lru_cache(maxsize=KEPT_TENSORS)
    def tensor(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {name}".encode()))
        return torch.randn(shapes[name], generator=generator)

    def read(name: str, box: Box) -> torch.Tensor:
        return box_of(tensor(name), box)

    return read


# Figures


def _trainer_uses(layout: Layout, plan: ShardPlan, dtype: str) -> tuple[TrainerUse, ...]:
    sent = plan.sent_bytes()
    return tuple(
        TrainerUse(
            rank=rank,
            tp=coords.tp,
            dp=coords.dp,
            pp=coords.pp,
            held_bytes=sum(map(prod, layout.params(rank).values())) * ITEM_BYTES[dtype],
            sent_bytes=sent.get(rank, 0),
            buckets=len(plan.of_source(rank)),
        )
        for rank in range(layout.topology.world)
        for coords in [layout.topology.coords(rank)]
    )


def _engine_uses(plan: ShardPlan) -> tuple[EngineUse, ...]:
    sizes = [[bucket.nbytes for _, bucket in plan.of_target(rank)] for rank in range(plan.engine_ranks)]
    return tuple(
        EngineUse(rank, sum(bucket_bytes), len(bucket_bytes), arena_bytes=sum(bucket_bytes))
        for rank, bucket_bytes in enumerate(sizes)
    )


def _minimum(layout: Layout, engine: Sequence[EngineRank], dtype: str) -> int:
    return sum(
        slot.hf_box.rows * slot.hf_box.cols * ITEM_BYTES[layout.hf_dtype(slot.hf_name, dtype)]
        for rank in engine
        for slot in rank.slots
    )


def _replica_groups(topology: Topology, plan: ShardPlan) -> tuple[ReplicaGroup, ...]:
    sent = plan.sent_bytes()
    groups = []
    for pp, tp in product(range(topology.pipeline), range(topology.tensor)):
        ranks = tuple(rank for rank in topology.stage_ranks(pp) if topology.coords(rank).tp == tp)
        loads = [sent.get(rank, 0) for rank in ranks]
        groups.append(ReplicaGroup(ranks, min(loads), max(loads)))
    return tuple(groups)


def _casts(layout: Layout, engine: Sequence[EngineRank], dtype: str) -> dict[str, tuple[str, ...]]:
    casts: dict[str, dict[str, None]] = defaultdict(dict)
    for rank in engine:
        for slot in rank.slots:
            sent, kept = layout.hf_dtype(slot.hf_name, dtype), rank.dtypes[slot.param]
            if sent != kept:
                casts[f"{sent} -> {kept}"][slot.hf_name] = None
    return {cast: tuple(names) for cast, names in casts.items()}


def _constants(engine: Sequence[EngineRank]) -> dict[str, dict[str, int]]:
    """Elements of each parameter that are set to each value, over all ranks."""
    elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for rank in engine:
        for fill in rank.fills:
            elements[fill.param][f"{fill.value:g}"] += fill.rows * fill.cols
    return {param: dict(values) for param, values in elements.items()}
