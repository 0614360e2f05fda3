"""The state of a run at one moment, as the display shows it. Plain data, made anew for every refresh."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Activity:
    """What one part of the run is doing, and for how many seconds already."""

    part: str
    doing: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """None stands for "not known yet" everywhere; nothing is filled in with a zero."""

    name: str
    run_dir: Path
    step: int
    total_steps: int
    version: int
    # Seconds since the run began, and what one of the latest steps took.
    seconds: float
    step_seconds: float | None = None
    # Mean reward of each trained step, oldest first; held-out greedy scores as (step, score).
    rewards: tuple[float | None, ...] = ()
    scores: tuple[tuple[int, float], ...] = ()
    # The latest score of each held-out set that has a name.
    set_scores: dict[str, float] = field(default_factory=dict)
    target: float | None = None
    # Tokens per second of wall time over the latest steps: trained by the trainer, sampled by the servers.
    trained_rate: float | None = None
    sampled_rate: float | None = None
    # Versions between sampling and training in the latest step, and the bound that the buffer keeps.
    staleness_mean: float | None = None
    staleness_max: float | None = None
    staleness_limit: int = 0
    # Active groups by state, such as {"generating": 12, "finished": 4}, of at most `capacity`.
    buffer: dict[str, int] = field(default_factory=dict)
    capacity: int = 0
    activities: tuple[Activity, ...] = ()
    # The latest messages, newest last.
    messages: tuple[str, ...] = ()

    @property
    def eta_seconds(self) -> float | None:
        """Until `total_steps` at the present speed; a target score may end the run earlier."""
        if self.step_seconds is None:
            return None
        return max(0, self.total_steps - self.step) * self.step_seconds
