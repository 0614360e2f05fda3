"""Where each trainer rank stands: tensor, data and pipeline coordinates, and the layers of each pipeline stage.

The order is Megatron's default ``tp-dp-pp``: tensor ranks are neighbours, pipeline stages are furthest apart. Each
answer is a pure function of the topology, so every process computes the same one without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megasync.errors import ConfigError

if TYPE_CHECKING:
    from megasync.config.schema import TrainerConfig


class Coords(NamedTuple):
    tp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel dimensions; ``first_stage_layers``/``last_stage_layers`` make the pipeline's ends uneven."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for key in ("tensor", "pipeline", "data"):
            if getattr(self, key) < 1:
                raise ConfigError(f"trainer.{key}_parallel is {getattr(self, key)}; it must be at least 1")

    @classmethod
    def from_config(cls, trainer: TrainerConfig) -> Topology:
        return cls(
            tensor=trainer.tensor_parallel,
            pipeline=trainer.pipeline_parallel,
            data=trainer.data_parallel,
            first_stage_layers=trainer.first_stage_layers,
            last_stage_layers=trainer.last_stage_layers,
        )

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def coords(self, rank: int) -> Coords:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside this topology of {self.world} ranks")
        return Coords(rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data))

    def rank(self, tp: int, dp: int, pp: int) -> int:
        return (pp * self.data + dp) * self.tensor + tp

    def stage_layers(self, num_layers: int) -> list[range]:
        """Global layer indices of each pipeline stage, as Megatron assigns them.

        The given end stages take their share; the stages between them split the rest evenly.

        Raises:
            ConfigError: the layers cannot be split that way.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        if self.pipeline == 1:
            if first is not None or last is not None:
                raise ConfigError(
                    "trainer.first_stage_layers and trainer.last_stage_layers need trainer.pipeline_parallel > 1; "
                    "leave them null"
                )
            return [range(num_layers)]
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
        if min(sizes) < 1:
            raise ConfigError(
                f"trainer.pipeline_parallel={self.pipeline} leaves a stage without a layer: {sizes} of {num_layers}"
            )
        starts = [sum(sizes[:stage]) for stage in range(self.pipeline)]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
