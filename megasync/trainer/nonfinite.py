"""The number of steps in a row that may be skipped because their loss or gradient was not finite."""

from __future__ import annotations

import logging

from megasync.errors import NonFiniteError

log = logging.getLogger(__name__)


class SkipBudget:
    """``allowed`` is `trainer.max_skipped_steps`."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self._left = allowed

    def count(self, applied: bool, step: str) -> None:
        """Counts a step that was applied or skipped, and logs a skipped one as ``step`` describes it.

        Raises NonFiniteError if it was one too many in a row.
        """
        if applied:
            self._left = self._allowed
            return
        log.error("Skipped %s", step)
        self._left -= 1
        if self._left < 0:
            raise NonFiniteError(
                f"{self._allowed + 1} steps in a row had a non-finite loss or gradient "
                f"(trainer.max_skipped_steps={self._allowed}); the last was {step}"
            )
