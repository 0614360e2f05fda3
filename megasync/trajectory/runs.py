"""Integers that repeat, as runs: what versions and loss masks of a response look like."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class Runs(Sequence[int]):
    """An immutable sequence of int32 numbers. ``values[i]`` repeats up to the position ``ends[i]``, which is exclusive.

    Neighbouring runs differ and none is empty, so equal sequences have equal runs. Equal to any sequence of the same
    numbers.
    """

    __slots__ = ("ends", "values")

    def __init__(self, values: IntArray, ends: IntArray) -> None:
        """Takes runs as they are; `of`, `fill` and `join` make them from anything else."""
        self.values = values
        self.ends = ends

    @classmethod
    def of(cls, numbers: Runs | Sequence[int] | NDArray[Any]) -> Runs:
        """Raises ValueError for what is not a sequence of integers of 32 bits."""
        if isinstance(numbers, Runs):
            return numbers
        values = int_array(numbers)
        if not values.size:
            return cls(values, values)
        last = np.flatnonzero(values[1:] != values[:-1])
        ends = np.append(last, values.size - 1).astype(np.int32)
        return cls(_frozen(values[ends]), _frozen(ends + 1))

    @classmethod
    def fill(cls, value: int, count: int) -> Runs:
        """The same number ``count`` times."""
        ends = [count] if count else []
        return cls(int_array([value] * len(ends)), int_array(ends))

    @classmethod
    def of_spans(cls, spans: Iterable[tuple[int, int]]) -> Runs:
        """Builds runs from values and their counts: the inverse of `spans`."""
        merged: list[list[int]] = []
        for value, count in spans:
            if count and merged and merged[-1][0] == value:
                merged[-1][1] += count
            elif count:
                merged.append([value, count])
        values = np.array([value for value, _ in merged], np.int32)
        ends = np.array(list(accumulate(count for _, count in merged)), np.int32)
        return cls(_frozen(values), _frozen(ends))

    def spans(self) -> list[tuple[int, int]]:
        """(value, count) of each run."""
        ends = self.ends.tolist()
        return [(value, end - start) for value, start, end in zip(self.values.tolist(), [0, *ends], ends, strict=False)]

    @classmethod
    def join(cls, parts: Iterable[Runs]) -> Runs:
        """All parts, one after the other."""
        filled = [part for part in parts if len(part)]
        if len(filled) < 2:
            return filled[0] if filled else cls.fill(0, 0)
        starts = np.cumsum([0, *map(len, filled)])
        values = np.concatenate([part.values for part in filled])
        ends = np.concatenate([part.ends + start for part, start in zip(filled, starts, strict=False)])
        last = np.append(values[1:] != values[:-1], True)
        return cls(_frozen(values[last]), _frozen(ends[last].astype(np.int32)))

    def expand(self) -> IntArray:
        """One entry per number."""
        lengths = self.ends.copy()
        lengths[1:] -= self.ends[:-1]
        return self.values.repeat(lengths)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.ends.size else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> int | Runs:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return Runs.of(self.expand()[index])
            return self._part(start, max(start, stop))
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"position {index} of {len(self)}")
        return int(self.values[np.searchsorted(self.ends, at, "right")])

    def _part(self, start: int, stop: int) -> Runs:
        if start == stop:
            return Runs.fill(0, 0)
        first = np.searchsorted(self.ends, start, "right")
        last = np.searchsorted(self.ends, stop, "left")
        ends = np.minimum(self.ends[first : last + 1], stop) - start
        return Runs(self.values[first : last + 1], _frozen(ends.astype(np.int32)))

    def __iter__(self) -> Iterator[int]:
        return iter(self.expand().tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Runs):
            return np.array_equal(self.values, other.values) and np.array_equal(self.ends, other.ends)
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))
        return NotImplemented

    def __repr__(self) -> str:
        counts = np.diff(self.ends, prepend=np.int32(0))
        return f"Runs({', '.join(f'{value} x{count}' for value, count in zip(self.values, counts, strict=True))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, (self.values, self.ends)


def int_array(numbers: Sequence[int] | NDArray[Any]) -> IntArray:
    """A contiguous read-only int32 array; the same object if it is one. Takes sequences, and arrays of NumPy and torch.

    Raises ValueError for other values than integers of 32 bits, with the position of one that is too large.
    """
    if isinstance(numbers, np.ndarray) and numbers.dtype == np.int32 and numbers.ndim == 1:
        return numbers if _fixed(numbers) else _frozen(numbers.copy())
    if isinstance(numbers, Runs):
        return _frozen(numbers.expand())
    if not hasattr(numbers, "__array__"):
        return _frozen(_of_sequence(numbers))
    array = _array(numbers, "iub", "integers")
    converted = array.astype(np.int32)
    if not np.array_equal(converted, array):
        raise _too_large(array.tolist())
    return _frozen(converted)


def _of_sequence(numbers: Any) -> IntArray:
    try:
        if not (isinstance(numbers, array) and numbers.typecode == "i"):
            # Several times as fast as NumPy. It takes what has `__index__`, and would take bytes as they are in memory.
            numbers = array("i", numbers if isinstance(numbers, list) else list(numbers))
        return np.array(numbers)
    except OverflowError:
        raise _too_large(numbers) from None
    except TypeError as error:
        raise ValueError(f"{numbers!r:.80} is not a sequence of integers ({error})") from None


def _too_large(numbers: Sequence[int]) -> ValueError:
    at, bad = next((at, number) for at, number in enumerate(numbers) if not -(2**31) <= number < 2**31)
    return ValueError(f"{bad} at position {at} does not fit into 32 bits")


def float_array(numbers: Sequence[float] | NDArray[Any]) -> FloatArray:
    """A contiguous read-only float32 array; the same object if it is one.

    Raises ValueError for other values than numbers.
    """
    array = _array(numbers, "iubf", "numbers")
    if array.dtype == np.float32 and _fixed(array):
        return array
    with np.errstate(over="ignore"):
        return _frozen(array.astype(np.float32, "C"))


def _array(numbers: Any, kinds: str, what: str) -> NDArray[Any]:
    try:
        array = np.asarray(numbers.expand() if isinstance(numbers, Runs) else numbers)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{numbers!r:.80} is not a sequence of {what} ({error})") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise ValueError(f"{numbers!r:.80} is not a sequence of {what}")
    return array


def _fixed(array: NDArray[Any]) -> bool:
    return array.flags.c_contiguous and not array.flags.writeable


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
