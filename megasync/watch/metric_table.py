"""The metrics of a run as columns: each name has the values that were logged under it, with their steps and times.

Nothing is filled in: a name has as many values as lines that contain it. Null, which stands for a number that is not
finite, is NaN.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from megasync.observe.events import LATEST_TIME
from megasync.observe.metrics import STEP, TIME

# The largest step that a chart can place. Names beyond the most are left out.
LARGEST_STEP = 2**53
MOST_NAMES = 10_000

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric, ordered by step. All arrays are [values]; `times` are seconds since the epoch."""

    steps: Integers
    times: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    @property
    def finite(self) -> Series:
        """Without values that were not finite."""
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.times[kept], self.values[kept])

    @property
    def total(self) -> float:
        """The sum over all starts of a counter that begins again when a run is resumed."""
        values = self.finite.values
        if not len(values):
            return 0.0
        return float(values[np.flatnonzero(np.diff(values) < 0)].sum() + values[-1])


def _number(value: object) -> float | None:
    """A logged value; NaN for null, None for what is no number. Raises OverflowError for an integer beyond floats."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) else None


class MetricTable:
    """Grows by lines of `metrics.jsonl`. Lines that are no such object are counted as `damaged` and left out."""

    def __init__(self) -> None:
        self.damaged = 0
        self._steps = array("q")
        self._times = array("d")
        # Per name: the numbers of the lines that have it, and its values.
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._cache: dict[str, Series] = {}

    def add(self, lines: Iterable[bytes]) -> None:
        decode = msgspec.json.Decoder(dict[str, object]).decode
        columns, number = self._columns, len(self._steps)
        self._cache.clear()
        for line in lines:
            try:
                row = decode(line)
                step, time = int(row.pop(STEP)), float(row.pop(TIME))  # pyright: ignore[reportArgumentType]
                if not (0 <= step <= LARGEST_STEP and 0 <= time <= LATEST_TIME):
                    raise ValueError("no step or no time")
                values = {name: _number(value) for name, value in row.items()}
            except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
                self.damaged += 1
                continue
            self._steps.append(step)
            self._times.append(time)
            for name, value in values.items():
                if value is None:
                    continue
                column = columns.get(name)
                if column is None:
                    if len(columns) == MOST_NAMES:
                        continue
                    column = columns[name] = (array("q"), array("d"))
                column[0].append(number)
                column[1].append(value)
            number += 1

    def __len__(self) -> int:
        """Number of lines."""
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """In the order in which they first appeared."""
        return list(self._columns)

    @property
    def times(self) -> Floats:
        """Seconds since the epoch of every line, in the order of the file: [lines]."""
        return np.array(self._times, np.float64)

    def series(self, name: str) -> Series:
        """Empty for a name that was never logged."""
        series = self._cache.get(name)
        if series is None:
            series = self._cache[name] = self._series(name)
        return series

    def latest(self, name: str) -> float | None:
        """The finite value of the latest step; None if there is none."""
        values = self.series(name).finite.values
        return float(values[-1]) if len(values) else None

    def aligned(self, names: Sequence[str]) -> tuple[Integers, Floats]:
        """Steps [lines] and values [names, lines] of the lines that have at least one of the names; NaN for gaps."""
        values = np.full((len(names), len(self)), np.nan)
        for row, name in zip(values, names, strict=True):
            if name in self._columns:
                numbers, column = self._columns[name]
                row[np.array(numbers, np.int64)] = column
        kept = np.flatnonzero(~np.isnan(values).all(axis=0)) if len(names) else np.zeros(0, np.int64)
        steps = np.array(self._steps, np.int64)[kept]
        order = np.argsort(steps, kind="stable")
        return steps[order], values[:, kept[order]]

    def _series(self, name: str) -> Series:
        numbers, column = self._columns.get(name, (array("q"), array("d")))
        at = np.array(numbers, np.int64)
        steps = np.array(self._steps, np.int64)[at]
        times = np.array(self._times, np.float64)[at]
        order = np.argsort(steps, kind="stable")
        return Series(steps[order], times[order], np.array(column, np.float64)[order])
