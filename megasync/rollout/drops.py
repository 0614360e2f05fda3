"""Dropped groups: the reasons, and the limit above which drops end the run. A pure state machine.

Invariant: a run whose groups keep failing ends with a summary of the causes. It neither loops through the dataset
silently nor ends because of one bad row.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from megasync.errors import DataError

# Reasons that are no failures: all rewards are equal, so there is nothing to learn. Solved is a reward of at least 1,
# failed one of at most 0, and anything between is uniform.
ALL_SOLVED, ALL_FAILED, UNIFORM = "all_solved", "all_failed", "uniform"
# Too few responses are left without those that reached the length limit.
OVERLONG = "overlong"
HARMLESS = frozenset({ALL_SOLVED, ALL_FAILED, UNIFORM, OVERLONG})
# A prompt that the curriculum leaves out.
LEFT_OUT = "left_out"
# A prompt that kills servers.
KILLS_SERVERS = "kills_servers"
# A prompt whose user code kills its rollout worker.
KILLS_WORKERS = "kills_workers"

# A broken reward function or workflow fails from the first group on; this many failures are enough to tell.
FIRST_GROUPS = 8
# Later, more failures than the allowed share of this many groups mean that too many generated tokens are wasted.
WINDOW = 64
# Causes in the summary, the most frequent first.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that will not be trained: the reason it is counted under, and the text of the error behind it, if any."""

    reason: str
    problem: str = ""


class DropLimit:
    """Counts finished groups, and raises DataError once too many have failed."""

    def __init__(self, largest_share: float) -> None:
        """`largest_share` of the last groups may be dropped for errors (`rollout.max_drop_share`)."""
        self._largest_share = largest_share
        self._seen = 0
        self._succeeded = False
        self._last: deque[tuple[str, Dropped] | None] = deque(maxlen=WINDOW)

    def passed(self) -> None:
        """Counts a group that was scored, whether it is trained or not."""
        self._seen += 1
        self._succeeded = True
        self._last.append(None)

    def failed(self, uid: str, drop: Dropped) -> None:
        """Counts a group that was dropped for an error. Raises DataError when that is one too many."""
        self._seen += 1
        self._last.append((uid, drop))
        drops = [drop for drop in self._last if drop is not None]
        if not self._succeeded and self._seen >= FIRST_GROUPS:
            raise DataError(f"all of the first {self._seen} groups were dropped.\n{_summary(drops)}")
        if len(self._last) == WINDOW and len(drops) > self._largest_share * WINDOW:
            raise DataError(
                f"{len(drops)} of the last {WINDOW} groups were dropped, more than rollout.max_drop_share="
                f"{self._largest_share:g} allows.\n{_summary(drops)}"
            )


def _summary(drops: list[tuple[str, Dropped]]) -> str:
    """One line per reason: its count and the latest example."""
    latest = {drop.reason: (uid, drop.problem) for uid, drop in drops}
    counts = Counter(drop.reason for _, drop in drops).most_common(SHOWN)
    return "\n".join(
        f"  {count} x {reason}, such as group {latest[reason][0]}"
        + (f": {latest[reason][1]}" if latest[reason][1] else "")
        for reason, count in counts
    )
