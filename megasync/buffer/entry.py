"""One group on its way through the buffer, and the states that it can be in. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from megasync.trajectory import Group, Partial


class State(StrEnum):
    """Where a group stands. The first four are live; a published group only marks its place in the order."""

    GENERATING = "generating"
    RETURNED = "returned"
    FINISHED = "finished"
    LEASED = "leased"
    UNPUBLISHED = "unpublished"
    PUBLISHED = "published"
    DROPPED = "dropped"


# Reasons of drops as earlier ledgers and checkpoints name them, and their names now.
RENAMED_REASONS = {"over_age": "stale"}

LIVE = (State.GENERATING, State.RETURNED, State.FINISHED, State.LEASED)
UNFINISHED = (State.GENERATING, State.RETURNED)
TRAINED = (State.UNPUBLISHED, State.PUBLISHED)

# Reads what is recorded, where nobody has needed it yet: a buffer that starts again reads no token before it is asked for.
Stored = Callable[[], Group]
StoredPartial = Callable[[], Partial]


@dataclass(slots=True)
class Entry:
    """``number`` is the group's place in the order of admission, counted over the whole life of a run."""

    uid: str
    number: int
    state: State
    # When the current generation began, on the injected clock.
    since: float
    # The step that leased or trained it; of a dropped group the step that was to be trained next.
    step: int = 0
    # Why it was dropped.
    reason: str = ""
    # Held while finished or leased.
    group: Group | Stored | None = None
    # Version of the group's oldest trained token; kept because looking through all tokens at every check is slow.
    oldest_version: int = 0
    # Who reclaimed it: the same claimant, asking again, gets it again.
    claimant: str = ""
    # What is generated of it so far, by (sample, turn).
    partials: dict[tuple[int, int], Partial | StoredPartial] = field(default_factory=dict)

    def loaded(self) -> Group:
        """Its group, read now if need be. Raises what reading it raises."""
        if callable(self.group):
            self.group = self.group()
        return self.group
