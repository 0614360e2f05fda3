"""When dropping groups stops being a nuisance and becomes the problem. A pure state machine.

Invariant: a run whose groups fail again and again ends with a summary; it neither spins through the dataset silently
nor ends because of one bad row.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from megasync.errors import DataError

# A reward function or workflow that is wrong fails from the first group on; so many are enough to say so.
FIRST_GROUPS = 8
# Later, more failures than the allowed share of so many groups mean that too many of the generated tokens are wasted.
WINDOW = 64
# Causes that the summary names, the most frequent first.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Drop:
    uid: str
    reason: str
    problem: str


class DropWatch:
    """Told of every finished group; raises DataError once too many have failed."""

    def __init__(self, largest_share: float) -> None:
        """`largest_share` of the last groups may be dropped for errors (`rollout.max_drop_share`)."""
        self._largest_share = largest_share
        self._seen = 0
        self._succeeded = False
        self._last: deque[_Drop | None] = deque(maxlen=WINDOW)

    def passed(self) -> None:
        """A group that could be scored, whether it is trained on or not."""
        self._seen += 1
        self._succeeded = True
        self._last.append(None)

    def failed(self, uid: str, reason: str, problem: str) -> None:
        """A group that had to be dropped for an error, with the error's text. Raises DataError when it is one too many."""
        self._seen += 1
        self._last.append(_Drop(uid, reason, problem))
        drops = [drop for drop in self._last if drop is not None]
        if not self._succeeded and self._seen >= FIRST_GROUPS:
            raise DataError(f"all of the first {self._seen} groups were dropped.\n{_summary(drops)}")
        if len(self._last) == WINDOW and len(drops) > self._largest_share * WINDOW:
            raise DataError(
                f"{len(drops)} of the last {WINDOW} groups were dropped, more than rollout.max_drop_share="
                f"{self._largest_share:g} allows.\n{_summary(drops)}"
            )


def _summary(drops: list[_Drop]) -> str:
    """A line for each reason: how often, and the latest example."""
    latest = {drop.reason: drop for drop in drops}
    counts = Counter(drop.reason for drop in drops).most_common(SHOWN)
    return "\n".join(
        f"  {count} x {reason}, such as group {latest[reason].uid}"
        + (f": {latest[reason].problem}" if latest[reason].problem else "")
        for reason, count in counts
    )
