"""How many groups may be active, how far the batcher looks ahead, and the staleness bound that follows from both.

Symbols: G groups per step, S max_staleness, k steps between two published versions, C capacity, W window.

- ``C = (S + 1) G k`` slots. A slot is held from a group's admission until the step that trained it is *published*.
- A batch is the G oldest eligible groups. A finished group is eligible when fewer than W groups were admitted after the
  oldest *unfinished* group, up to and including itself. With W = 1 no group overtakes an unfinished one (strict FIFO).
  This is the windowed FIFO of MiniMax (arXiv 2605.26494, section 6.2.4), as TitanRL in torchtitan implements it;
  docs/buffer.md lists the differences.

Bound: let group f be admitted while version v is published. At that time at most C - 1 other groups hold a slot. Only
these groups, and later ones that overtake f, can be trained before f. At most W - 1 groups overtake f: each of them
counts against the window while f is unfinished, and once f is finished it is older than they are. So f is trained no
later than step ``n = k v + ceil((C + W - 1) / G)``, at version ``floor((n - 1) / k)``. Its staleness is at most

    ``S + ceil((W - 1) / (G k))``  =  max_staleness + window slack.

No deadlock: once every generation has ended, no group is unfinished, so every finished group is eligible. If fewer than
G groups are finished, none are leased and at most ``(k - 1) G`` are trained but unpublished, then
``C - (G - 1) - (k - 1) G > 0`` slots are free for new groups. `TrajectoryBuffer.admission_blocker` handles the end of a
run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig


@dataclass(frozen=True, slots=True)
class Pacing:
    """The parameters of the schedule that determine capacity, window and staleness bound.

    ``window_fraction`` is the window as a fraction of the capacity; None means strict FIFO. Raises ValueError for a
    parameter out of range.
    """

    groups_per_step: int
    max_staleness: int
    weight_sync_steps: int = 1
    window_fraction: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("groups_per_step", 1), ("max_staleness", 0), ("weight_sync_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.window_fraction is not None and not 0 <= self.window_fraction <= 1:
            raise ValueError(f"window_fraction={self.window_fraction} must be between 0 and 1, or None for strict FIFO")

    @classmethod
    def of(cls, schedule: ScheduleConfig) -> Pacing:
        return cls(
            schedule.groups_per_step, schedule.max_staleness, schedule.weight_sync_steps, schedule.window_fraction
        )

    @property
    def capacity(self) -> int:
        """Number of groups that may hold a slot at the same time."""
        return (self.max_staleness + 1) * self.groups_per_step * self.weight_sync_steps

    @property
    def window(self) -> int:
        """Number of groups that the batcher looks ahead, counted from the oldest unfinished one; 1 is strict FIFO.

        Synchronous training is always strict FIFO, because its batches must not depend on which group finishes first.
        """
        if self.window_fraction is None or self.max_staleness == 0:
            return 1
        return max(1, int(self.window_fraction * self.capacity))

    @property
    def window_slack(self) -> int:
        """Number of versions by which overtaking can make a straggler exceed ``max_staleness``."""
        return math.ceil((self.window - 1) / (self.groups_per_step * self.weight_sync_steps))

    @property
    def staleness_bound(self) -> int:
        """The largest ``trainer version - oldest trained token's version`` that a leased trajectory can have."""
        return self.max_staleness + self.window_slack
