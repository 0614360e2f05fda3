"""From which of several sets each prompt of a run is drawn: a function of the number of prompts drawn before.

So shares are exact from the first prompt on, and a resumed run continues them without any state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

from megasync.errors import DataError

# Weights are ratios of whole numbers up to this one, and a cycle is at most so many draws.
FINEST = 1000
LONGEST = 100_000


class Mixture:
    """Draws go through cycles. Whole weights without a common divisor are the draws of each set in a cycle."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises DataError for weights whose ratio is too fine."""
        parts = [Fraction(weight).limit_denominator(FINEST) for weight in weights]
        scale = lcm(*(part.denominator for part in parts))
        quotas = [int(part * scale) for part in parts]
        common = gcd(*quotas)
        if not common or 0 in quotas or sum(quotas) // common > LONGEST:
            raise DataError(
                f"weights {', '.join(f'{weight:g}' for weight in weights)} are too far apart or too fine: they must "
                f"be the shares of at most {LONGEST} draws; round them"
            )
        self.quotas = [quota // common for quota in quotas]
        # (set, its earlier draws in the cycle) of each draw of a cycle, and the draws of all sets before it.
        self._cycle: list[tuple[int, int]] = []
        self._before: list[tuple[int, ...]] = []
        drawn, total = [0] * len(weights), sum(self.quotas)
        for number in range(1, total + 1):
            self._before.append(tuple(drawn))
            # Draw k of a set has a window: from where the set's share exceeds k to where it reaches k + 1. To choose
            # the window that ends first keeps all of them (as for periodic jobs on one processor), so each set stays
            # within a draw of its share. Choosing the set that is furthest behind does not, from four sets on.
            open_ones = (each for each, quota in enumerate(self.quotas) if drawn[each] * total < quota * number)
            chosen = min(open_ones, key=lambda each: -(-(drawn[each] + 1) * total // self.quotas[each]))
            self._cycle.append((chosen, drawn[chosen]))
            drawn[chosen] += 1

    def at(self, number: int) -> tuple[int, int]:
        """The set of a draw, and the number of that set's draws before it. ``number`` counts from 0."""
        cycle, place = divmod(number, len(self._cycle))
        chosen, earlier = self._cycle[place]
        return chosen, cycle * self.quotas[chosen] + earlier

    def drawn(self, number: int) -> list[int]:
        """The draws of each set among the first ``number``."""
        cycle, place = divmod(number, len(self._cycle))
        return [cycle * quota + now for quota, now in zip(self.quotas, self._before[place], strict=True)]
