"""Everything that a buffer knows, as plain data: what the ledger keeps and a new process starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megasync.buffer.entry import Entry


@dataclass(slots=True)
class Standing:
    """Where the buffer stands, apart from its groups.

    Dicts are replaced, never changed in place: the ledger tells a changed value by its identity first.
    """

    # The published version.
    version: int = 0
    # The newest version ever seen, on a token or published: a number that must not be given to other weights.
    newest_version: int = 0
    # The last step that was trained, and the version that the step which is out now was leased at.
    last_step: int = 0
    leased_version: int = 0
    # Groups trained up to this step are in every checkpoint that is kept. -1 while there is none.
    oldest_kept: int = -1
    # Why the buffer is closed.
    closed: str | None = None
    regenerated: int = 0
    masked_tokens: int = 0
    removed_trajectories: int = 0
    # Steps that raised an error on a batch: how often each group was in one (by uid), and what the last one came to.
    failed_attempts: dict[str, int] = field(default_factory=dict)
    failed_step: dict[str, Any] = field(default_factory=dict)
    # Batches set aside for it since a step was trained that got as far.
    set_aside_in_a_row: int = 0
    # What the record began with: counters (trained, dropped) of an earlier run whose groups are not in it.
    inherited: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def first(cls, step: int, version: int, counters: dict[str, Any]) -> Standing:
        """Of a buffer without groups; ``counters`` are what `TrajectoryBuffer.counters` gave an earlier run."""
        ended = ("trained", "dropped")
        return cls(
            version=version,
            newest_version=version,
            last_step=step,
            **{key: value for key, value in counters.items() if key not in ended},
            inherited={key: counters[key] for key in ended if key in counters},
        )


@dataclass(slots=True)
class Record:
    """``entries`` are those that still matter; the numbers are of all groups ever recorded."""

    standing: Standing
    entries: list[Entry]
    admitted: int
    trained: int
    dropped: dict[str, int]
