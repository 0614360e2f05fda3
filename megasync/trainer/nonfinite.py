"""The number of steps in a row that may be skipped because their loss or gradient was not finite."""

from __future__ import annotations

from megasync.errors import NonFiniteError


class SkipBudget:
    """``allowed`` is `trainer.max_skipped_steps`."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self._left = allowed

    def applied(self) -> None:
        """A step was finite."""
        self._left = self._allowed

    def skipped(self, last: str) -> None:
        """A step was not; ``last`` describes it. Raises NonFiniteError if that was one too many in a row."""
        self._left -= 1
        if self._left < 0:
            raise NonFiniteError(
                f"{self._allowed + 1} steps in a row had a non-finite loss or gradient "
                f"(trainer.max_skipped_steps={self._allowed}); the last was {last}"
            )
