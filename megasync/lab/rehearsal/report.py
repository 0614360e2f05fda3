"""What a rehearsal finds, as plain values that any process can read. Imports neither torch nor Megatron."""

from __future__ import annotations

from dataclasses import dataclass

from megasync.concurrency.first_use import prepared


@prepared
@dataclass(frozen=True)
class RankReport:
    """One rehearsed rank."""

    rank: int
    parameters: int
    # Bytes by kind of memory, as held and as planned; empty if the rank could not be built.
    held: dict[str, int]
    planned: dict[str, int]
    seconds: float
    # Sentences, in the order in which the differences were found; none if the rank is as planned.
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Rehearsal:
    """The rehearsed ranks of a configuration on one version of megatron-core, in ascending order."""

    megatron: str
    ranks: tuple[RankReport, ...]

    @property
    def difference(self) -> str | None:
        """The first difference of the first rank that has one."""
        return next((f"rank {rank.rank}: {text}" for rank in self.ranks for text in rank.differences), None)
