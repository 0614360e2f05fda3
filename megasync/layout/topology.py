"""The parallel coordinates of each trainer rank, for dense layers and experts, and the layers of each pipeline stage.

The order is Megatron's default ``tp-cp-dp-pp``: tensor ranks are neighbours, then context ranks, and pipeline stages
are furthest apart. Context ranks hold equal weights, as data ranks do, but share the tokens of each sequence. Experts
are distributed over the same ranks of a stage in an order of their own, ``etp-ep-edp``. Everything is a pure function
of the topology, so every process computes the same without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from megasync.errors import ConfigError

if TYPE_CHECKING:
    from megasync.config.schema import TrainerConfig


class Coords(NamedTuple):
    """Tensor, data, pipeline and context coordinates of a rank."""

    tp: int
    dp: int
    pp: int
    cp: int = 0


class ExpertCoords(NamedTuple):
    """Coordinates of a rank among those that share its stage's experts: ``edp`` counts copies of the same slices."""

    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Topology:
    """The sizes of the parallel dimensions."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    # The sizes of the pipeline's ends; None: as the other stages.
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    # Ranks that share the experts of a layer.
    expert: int = 1
    # Ranks that share each expert; None: as many as `tensor`.
    expert_tensor: int | None = None
    # Chunks of layers of each rank; the pipeline passes through all ranks as many times.
    virtual: int = 1
    context: int = 1
    # The sizes of all chunks, in place of those of the ends.
    pipeline_layout: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A topology that was read from JSON or a configuration has a list.
        object.__setattr__(self, "pipeline_layout", tuple(self.pipeline_layout))
        for name in ("tensor", "pipeline", "data", "expert", "expert_tensor", "context"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"trainer.{name}_parallel is {size}; it must be at least 1")
        if self.virtual < 1:
            raise ConfigError(f"trainer.virtual_pipeline is {self.virtual}; it must be at least 1")
        if self.virtual > 1 and self.pipeline == 1:
            raise ConfigError(
                f"trainer.virtual_pipeline={self.virtual} interleaves pipeline stages, but "
                f"trainer.pipeline_parallel=1; raise pipeline_parallel or set virtual_pipeline=1"
            )
        self._check_layout()
        if self.stage_size % (self.expert * self.expert_tensor_size):
            etp = f"{self.expert_tensor}" if self.expert_tensor else f"{self.tensor} (as trainer.tensor_parallel)"
            context = f"trainer.context_parallel={self.context} x " if self.context > 1 else ""
            raise ConfigError(
                f"trainer.expert_parallel={self.expert} x trainer.expert_tensor_parallel={etp} must divide the "
                f"{self.stage_size} ranks of a pipeline stage (trainer.tensor_parallel={self.tensor} x "
                f"{context}trainer.data_parallel={self.data}); change one of them"
            )

    def _check_layout(self) -> None:
        counts = list(self.pipeline_layout)
        if not counts:
            return
        if self.pipeline == 1:
            raise ConfigError(
                f"trainer.pipeline_layout={counts} needs several pipeline stages, but trainer.pipeline_parallel=1; set "
                f"it to [] or raise pipeline_parallel"
            )
        for name in ("first_stage_layers", "last_stage_layers"):
            if (layers := getattr(self, name)) is not None:
                raise ConfigError(
                    f"trainer.pipeline_layout={counts} sets the layers of all stages, and trainer.{name}={layers} "
                    f"those of one; set pipeline_layout to [] or {name} to null"
                )
        if len(counts) != self.pipeline * self.virtual:
            raise ConfigError(
                f"trainer.pipeline_layout={counts} has {len(counts)} numbers; it needs {self.pipeline * self.virtual}, "
                f"one for each chunk (trainer.pipeline_parallel={self.pipeline} x trainer.virtual_pipeline="
                f"{self.virtual})"
            )
        if min(counts) < 1:
            raise ConfigError(f"trainer.pipeline_layout={counts} leaves a chunk without a layer; each needs at least 1")

    @classmethod
    def from_config(cls, trainer: TrainerConfig) -> Topology:
        return cls(
            tensor=trainer.tensor_parallel,
            pipeline=trainer.pipeline_parallel,
            data=trainer.data_parallel,
            first_stage_layers=trainer.first_stage_layers,
            last_stage_layers=trainer.last_stage_layers,
            expert=trainer.expert_parallel,
            expert_tensor=trainer.expert_tensor_parallel,
            virtual=trainer.virtual_pipeline,
            context=trainer.context_parallel,
            pipeline_layout=tuple(trainer.pipeline_layout),
        )

    def largest_on(self, ranks: int, least: int = 1) -> Topology | None:
        """The same topology with as many data ranks as fit on ``ranks``; None if that is fewer than ``least``."""
        for data in range(min(self.data, ranks * self.data // self.world), least - 1, -1):
            # Experts may need a number of data ranks that is a multiple of something.
            with suppress(ConfigError):
                return replace(self, data=data)
        return None

    @property
    def world(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share one expert."""
        return self.expert_tensor or self.tensor

    @property
    def expert_data(self) -> int:
        """Copies of each expert's slices within a stage."""
        return self.stage_size // (self.expert * self.expert_tensor_size)

    def coords(self, rank: int) -> Coords:
        self._check(rank)
        stage, within = divmod(rank, self.stage_size)
        outer, tp = divmod(within, self.tensor)
        return Coords(tp, outer // self.context, stage, outer % self.context)

    def expert_coords(self, rank: int) -> ExpertCoords:
        """Expert coordinates of the same rank; its pipeline stage is that of `coords`."""
        self._check(rank)
        within, etp = rank % self.stage_size, self.expert_tensor_size
        return ExpertCoords(within % etp, within // etp % self.expert, within // (etp * self.expert))

    def expert_peers(self, dp: int) -> range:
        """Data-parallel coordinates of the ranks that exchange tokens for experts with those of ``dp``."""
        # At least all context ranks of ``dp``, which compute the same microbatches.
        period = lcm(self.replica_ranks, self.tensor * self.context) // (self.tensor * self.context)
        return range(dp // period * period, (dp // period + 1) * period)

    @property
    def replica_ranks(self) -> int:
        """Ranks of a stage in one *replica*: the fewest consecutive ones that hold all of the stage's weights."""
        return lcm(self.tensor, self.expert * self.expert_tensor_size)

    @property
    def replicas(self) -> int:
        """Replicas of the model; equal ranks of any two hold equal shards."""
        return self.stage_size // self.replica_ranks

    def with_replicas(self, count: int) -> Topology:
        """The same topology with another number of replicas, and data ranks in place of context ranks."""
        return replace(self, data=count * self.replica_ranks // self.tensor, context=1)

    def replica_of(self, rank: int) -> int:
        """The replica that a rank belongs to."""
        self._check(rank)
        return rank % self.stage_size // self.replica_ranks

    def rank_of(self, replicas: Sequence[int], local: int) -> int:
        """The rank that is ``local`` in ``with_replicas(len(replicas))``, whose replicas are these, in order."""
        stage, within = divmod(local, len(replicas) * self.replica_ranks)
        number, place = divmod(within, self.replica_ranks)
        return stage * self.stage_size + replicas[number] * self.replica_ranks + place

    def local_rank(self, replicas: Sequence[int], rank: int) -> int | None:
        """The inverse of `rank_of`: the local rank of ``rank``, or None for a rank of another replica."""
        if (replica := self.replica_of(rank)) not in replicas:
            return None
        stage, within = divmod(rank, self.stage_size)
        number = stage * len(replicas) + replicas.index(replica)
        return number * self.replica_ranks + within % self.replica_ranks

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside this topology of {self.world} ranks")

    def rank(self, tp: int, dp: int, pp: int, cp: int = 0) -> int:
        return ((pp * self.data + dp) * self.context + cp) * self.tensor + tp

    def stage_ranks(self, pp: int) -> range:
        """All ranks of a pipeline stage."""
        return range(self.rank(0, 0, pp), self.rank(0, 0, pp + 1))

    def stage_layers(self, num_layers: int) -> list[list[range]]:
        """Global layer indices of each pipeline stage, one range per virtual stage, as Megatron assigns them.

        The end stages take what is configured; the stages between them split the rest evenly. With virtual stages, each
        stage's share is cut into equal chunks, and the first chunks of all stages precede the second ones.
        `pipeline_layout` gives the size of each chunk in that order. Raises ConfigError when the layers cannot be split
        that way.
        """
        if self.pipeline_layout:
            return self._laid_out(num_layers)
        sizes = self._stage_sizes(num_layers)
        if any(size % self.virtual for size in sizes):
            raise ConfigError(
                f"trainer.virtual_pipeline={self.virtual} does not divide the layers of each pipeline stage: "
                f"{sizes} of {num_layers}; choose a divisor, or other stage sizes"
            )
        sizes = [size // self.virtual for size in sizes]
        starts = [
            [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(self.virtual)] for stage in range(self.pipeline)
        ]
        return [[range(start, start + size) for start in firsts] for firsts, size in zip(starts, sizes, strict=True)]

    def _laid_out(self, num_layers: int) -> list[list[range]]:
        counts = self.pipeline_layout
        if sum(counts) != num_layers:
            raise ConfigError(
                f"trainer.pipeline_layout={list(counts)} has {sum(counts)} layers, but the model has {num_layers}; "
                f"change the numbers"
            )
        chunks = [range(sum(counts[:place]), sum(counts[: place + 1])) for place in range(len(counts))]
        return [chunks[stage :: self.pipeline] for stage in range(self.pipeline)]

    def _stage_sizes(self, num_layers: int) -> list[int]:
        first, last = self.first_stage_layers, self.last_stage_layers
        if self.pipeline == 1:
            if first is not None or last is not None:
                raise ConfigError(
                    "trainer.first_stage_layers and trainer.last_stage_layers need trainer.pipeline_parallel > 1; "
                    "leave them null"
                )
            return [num_layers]
        counts: list[int | None] = [None] * self.pipeline
        counts[0], counts[-1] = first, last
        rest = num_layers - sum(count for count in counts if count is not None)
        open_stages = counts.count(None)
        share = rest // open_stages if open_stages else 0
        if share * open_stages != rest:
            raise ConfigError(
                f"{num_layers} layers do not fit trainer.pipeline_parallel={self.pipeline}: {rest} layers are left for "
                f"{open_stages} stages (trainer.first_stage_layers={first}, trainer.last_stage_layers={last})"
            )
        sizes = [share if count is None else count for count in counts]
        if not open_stages and self.virtual > 1:
            # Megatron divides by the number of stages in between.
            raise ConfigError(
                f"trainer.virtual_pipeline={self.virtual} with trainer.pipeline_parallel=2 cannot take both "
                f"trainer.first_stage_layers={first} and trainer.last_stage_layers={last}; give only one of them"
            )
        if min(sizes) < 1:
            raise ConfigError(
                f"trainer.pipeline_parallel={self.pipeline} leaves a stage without a layer: {sizes} of {num_layers}"
            )
        return sizes
