"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random


class Waits:
    """Waits that double, each a little off, so that requests that failed together do not come back together."""

    def __init__(self, first_and_longest: tuple[float, float], rng: random.Random | None = None) -> None:
        """In seconds."""
        self._first, self._longest = first_and_longest
        self._wait = self._first
        self._uniform = (rng or random).uniform

    def next(self) -> float:
        wait, self._wait = self._wait, min(2 * self._wait, self._longest)
        return wait * self._uniform(0.75, 1.25)

    def reset(self) -> None:
        self._wait = self._first
