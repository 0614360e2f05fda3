"""When dropping groups stops being a nuisance and becomes the problem. A pure state machine.

Invariant: a run whose groups fail again and again ends with a summary; it neither spins through the dataset silently
nor ends because of one bad row.
"""

from __future__ import annotations

from collections import Counter, deque

from megasync.errors import DataError

# A reward function or workflow that is wrong fails from the first group on; so many are enough to say so.
FIRST_GROUPS = 8
# Later, more failures than this share of so many groups mean that most of the generated tokens are wasted.
WINDOW = 64
LARGEST_SHARE = 0.5


class DropWatch:
    """Told of every finished group; raises DataError once too many have failed."""

    def __init__(self) -> None:
        self._seen = 0
        self._succeeded = False
        self._last: deque[str | None] = deque(maxlen=WINDOW)

    def passed(self) -> None:
        """A group that could be scored, whether it is trained on or not."""
        self._seen += 1
        self._succeeded = True
        self._last.append(None)

    def failed(self, reason: str, problem: str) -> None:
        """A group that had to be dropped for an error, with the error's text. Raises DataError when it is one too many."""
        self._seen += 1
        self._last.append(f"{reason}: {problem}" if problem else reason)
        failures = [problem for problem in self._last if problem is not None]
        if not self._succeeded and self._seen >= FIRST_GROUPS:
            raise DataError(f"all of the first {self._seen} groups were dropped. {_summary(failures)}")
        if len(self._last) == WINDOW and len(failures) > LARGEST_SHARE * WINDOW:
            raise DataError(f"{len(failures)} of the last {WINDOW} groups were dropped. {_summary(failures)}")


def _summary(failures: list[str]) -> str:
    counts = Counter(failures).most_common(3)
    return "The most frequent causes: " + "; ".join(f"{count} x {problem}" for problem, count in counts)
