"""How far a run is: steps trained, versions published, scores so far. Plain data, saved in each checkpoint.

Invariant: a version number names one set of weights for the whole life of a run. `next_version` gives each number out
once, even when the publish that it was for failed: some server may hold those weights under it.

A step does not: training that returns to a checkpoint trains later steps again. `incarnation` tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """`step` is the last trained step."""

    step: int = 0
    # The published version.
    version: int = 0
    # Steps trained since then: the trainer's weights are that much newer.
    unpublished: int = 0
    # Held-out scores as (step, score).
    history: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    # The highest version number given out, published or not.
    claimed: int = 0
    # The steps that training has gone back to, in this process.
    returns: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.claimed = max(self.claimed, self.version)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Reads what `state` put into a checkpoint."""
        history = [(step, score) for step, score in state["history"]]
        return cls(state["step"], state["version"], state["unpublished"], history)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "version": self.version, "unpublished": self.unpublished, "history": self.history}

    def next_version(self) -> int:
        """Claims an unused number for the trainer's current weights."""
        self.claimed += 1
        return self.claimed

    def trained(self, step: int) -> None:
        self.step, self.unpublished = step, self.unpublished + 1

    def published(self, version: int) -> None:
        self.version, self.unpublished = version, 0

    def incarnation(self, step: int) -> int:
        """How often training has gone back behind a step. The step's weights are the same while this number is."""
        return sum(to < step for to in self.returns)

    def rewind(self, step: int) -> None:
        """The trainer holds the weights of an earlier step, the servers do not. Versions never go back."""
        self.step, self.unpublished = step, max(1, self.unpublished)
        self.returns.append(step)
        self.history = [(at, score) for at, score in self.history if at <= step]
