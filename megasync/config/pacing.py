"""How many groups may be active, how far the batcher looks ahead, and the staleness bound that follows from both.

Symbols: G groups a step, S max_staleness, k steps between two published versions, C capacity, W window.

- ``C = (S + 1) G k`` slots. A slot is held from a group's admission until the step that trained it is *published*.
- A batch is the G oldest eligible groups. A finished group is eligible when fewer than W groups were admitted after the
  oldest *unfinished* group, up to and including itself. With W = 1 nothing passes an unfinished group (strict FIFO).
  This windowed FIFO is that of MiniMax (arXiv 2605.26494, section 6.2.4), as TitanRL in torchtitan implements it;
  docs/buffer.md says what differs.

Bound: let group f be admitted while version v is published. At most C - 1 other groups hold a slot then, and they are
all that can be trained before f, apart from groups admitted later that overtake it: at most W - 1 do, since each of
them counts against the window as long as f is unfinished, and a finished f is older than they are. So f is trained at
the latest in step ``n = k v + ceil((C + W - 1) / G)``, at version ``floor((n - 1) / k)``, which makes its staleness at
most

    ``S + ceil((W - 1) / (G k))``  =  max_staleness + window slack.

No deadlock: once every generation has ended there is no unfinished group, so every finished group is eligible. Fewer
than G of them, none leased, and at most ``(k - 1) G`` trained but unpublished leave ``C - (G - 1) - (k - 1) G > 0``
slots for new groups. The end of a run is in `TrajectoryBuffer.admission_blocker`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasync.config.schema import ScheduleConfig


@dataclass(frozen=True, slots=True)
class Pacing:
    """``window_fraction`` is the window as a share of the capacity; None is strict FIFO. Raises ValueError."""

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
        """Groups that may hold a slot at once."""
        return (self.max_staleness + 1) * self.groups_per_step * self.weight_sync_steps

    @property
    def window(self) -> int:
        """Groups that the batcher looks ahead, counted from the oldest unfinished one; 1 is strict FIFO.

        Synchronous training is always strict, because its batches must not depend on which group finished first.
        """
        if self.window_fraction is None or self.max_staleness == 0:
            return 1
        return max(1, int(self.window_fraction * self.capacity))

    @property
    def window_slack(self) -> int:
        """Versions by which overtaking can make a straggler older than ``max_staleness``."""
        return math.ceil((self.window - 1) / (self.groups_per_step * self.weight_sync_steps))

    @property
    def staleness_bound(self) -> int:
        """The largest ``trainer version - oldest trained token's version`` that a leased trajectory can have."""
        return self.max_staleness + self.window_slack
