"""Copies between strided views as loops, and such loops cut into rectangles.

A `Run` is one loop of a copy. Walked over a contiguous array, each loop belongs to one dimension of it (`align`); loops
over a matrix then give rectangles of rows and columns (`rectangles`). Everything here is integers, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from megasync.layout.engine_layout import Fill, Slot
from megasync.layout.layout import Box


class Run(NamedTuple):
    """``count`` steps of ``source`` elements (or, after `align`, positions) there and ``target`` elements here."""

    count: int
    source: int
    target: int


class NotRectangular(Exception):
    """The elements of a view are no rectangle of the array it looks into."""


def strides_of(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous array, in elements."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def position(offset: int, shape: Sequence[int]) -> list[int]:
    """The index of the element at ``offset`` of a contiguous array."""
    return [offset // stride % size for stride, size in zip(strides_of(shape), shape, strict=True)]


def align(runs: Iterable[Run], offset: int, shape: Sequence[int]) -> list[list[Run]]:
    """For each dimension of a contiguous array the loops along it, outermost first; ``source`` counts its positions.

    A loop over several dimensions is split. ``offset`` is that of the first element; no run may have source 0.

    Raises:
        NotRectangular: a loop leaves a dimension in the middle.
    """
    strides, start = strides_of(shape), position(offset, shape)
    walks: list[list[Run]] = [[] for _ in shape]
    pending = [run for run in runs if run.count > 1]
    while pending:
        run = pending.pop()
        dim = next((d for d, stride in enumerate(strides) if shape[d] > 1 and run.source % stride == 0), None)
        if dim is None:
            raise NotRectangular
        step = run.source // strides[dim]
        if start[dim] + (run.count - 1) * step < shape[dim]:
            walks[dim].append(Run(run.count, step, run.target))
            continue
        inner = shape[dim] // step
        if shape[dim] % step or start[dim] >= step or run.count % inner:
            raise NotRectangular
        pending.append(Run(inner, run.source, run.target))
        pending.append(Run(run.count // inner, run.source * inner, run.target * inner))
    for dim, walk in enumerate(walks):
        if start[dim] + sum((run.count - 1) * run.source for run in walk) >= shape[dim]:
            raise NotRectangular
    return [merge(walk) for walk in walks]


def merge(runs: Iterable[Run]) -> list[Run]:
    """Fewer loops over the same elements, outermost (largest source step) first."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.source, reverse=True):
        outer = merged[-1] if merged else None
        if outer and (outer.source, outer.target) == (run.source * run.count, run.target * run.count):
            merged[-1] = Run(outer.count * run.count, run.source, run.target)
        else:
            merged.append(run)
    return merged


def unrolled(loops: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """How far source and target have gone in each pass of nested loops."""
    for passes in product(*(range(loop.count) for loop in loops)):
        pairs = list(zip(passes, loops, strict=True))
        yield sum(i * loop.source for i, loop in pairs), sum(i * loop.target for i, loop in pairs)


def clip(runs: Sequence[Run], start: int, first: int, length: int) -> Iterator[tuple[int, list[Run], int]]:
    """Of loops along one dimension, what lies within ``length`` positions from ``first`` on.

    Gives the place of its first position behind ``first``, its loops, and how far the target has gone until there.
    """
    *outer, run = runs or [Run(1, 1, 0)]
    for source, target in unrolled(outer):
        behind = first - start - source
        low = max(0, -(-behind // run.source))
        high = min(run.count, -(-(behind + length) // run.source))
        if low < high:
            yield low * run.source - behind, [Run(high - low, *run[1:])], target + low * run.target


def rectangles(runs: Iterable[Run], offset: int, shape: tuple[int, int], name: str, param: str, at: int) -> list[Slot]:
    """The slots of a copy out of a matrix ``name`` of ``shape`` from element ``offset`` on, to element ``at`` of param."""
    (row, col), walks = position(offset, shape), align(runs, offset, shape)
    (row_loops, rows), (col_loops, cols) = map(_innermost, walks)
    return [
        Slot(
            name,
            Box(row + down, rows.count, col + right, cols.count),
            param,
            at + below + beside,
            rows.target,
            cols.target,
        )
        for down, below in unrolled(row_loops)
        for right, beside in unrolled(col_loops)
    ]


def _innermost(walk: list[Run]) -> tuple[list[Run], Run]:
    """The loop that goes position by position, apart from the others."""
    if walk and walk[-1].source == 1:
        return walk[:-1], walk[-1]
    return walk, Run(1, 1, 1)


def fill_rectangles(runs: Iterable[Run], param: str, at: int, value: float) -> list[Fill]:
    """The fills of a constant written by ``runs`` from element ``at`` of ``param`` on; sources are not looked at."""
    walk = merge(Run(run.count, run.target, run.target) for run in runs if run.count > 1)
    *loops, rows, cols = [Run(1, 0, 1), Run(1, 0, 1), *walk]
    return [
        Fill(param, at + behind, rows.count, cols.count, rows.target, cols.target, value)
        for _, behind in unrolled([loop for loop in loops if loop.count > 1])
    ]


def coalesce(slots: Iterable[Slot]) -> list[Slot]:
    """As few slots as neighbours allow, in the order of their tensors' names."""
    by_rows = _joined(slots)
    by_cols = map(_flip, _joined(map(_flip, by_rows)))
    return sorted(map(_plain, by_cols))


def _joined(slots: Iterable[Slot]) -> list[Slot]:
    joined: list[Slot] = []
    for slot in sorted(slots, key=lambda s: (s.hf_name, s.param, s.hf_box.col, s.hf_box.cols, s.hf_box.row, s.offset)):
        longer = _below(joined[-1], slot) if joined else None
        if longer:
            joined[-1] = longer
        else:
            joined.append(slot)
    return joined


def _below(upper: Slot, lower: Slot) -> Slot | None:
    """One slot for both, when ``lower`` continues ``upper`` row by row in the tensor and in the parameter."""
    a, b = upper.hf_box, lower.hf_box
    if upper[0] != lower[0] or upper.param != lower.param or (a.col, a.cols, a.row + a.rows) != (b.col, b.cols, b.row):
        return None
    if a.cols > 1 and upper.col_stride != lower.col_stride:
        return None
    gap = lower.offset - upper.offset
    stride = upper.row_stride if a.rows > 1 else lower.row_stride if b.rows > 1 else gap
    if stride <= 0 or gap != a.rows * stride or (b.rows > 1 and lower.row_stride != stride):
        return None
    return upper._replace(hf_box=a._replace(rows=a.rows + b.rows), row_stride=stride)


def _flip(slot: Slot) -> Slot:
    box = slot.hf_box
    return slot._replace(
        hf_box=Box(box.col, box.cols, box.row, box.rows), row_stride=slot.col_stride, col_stride=slot.row_stride
    )


def _plain(slot: Slot) -> Slot:
    """Strides of single rows and columns as if they were contiguous, so that equal slots compare equal."""
    box = slot.hf_box
    col_stride = slot.col_stride if box.cols > 1 else 1
    return slot._replace(col_stride=col_stride, row_stride=slot.row_stride if box.rows > 1 else box.cols * col_stride)


def overlap(a: Fill, b: Fill) -> bool:
    """Whether two rectangles of one parameter share an element, judged by the lines they are made of."""
    if _end(a) <= b.offset or _end(b) <= a.offset:
        return False
    lines, others = _lines(a), _lines(b)
    events = sorted([(start, end, 0) for start, end in lines] + [(start, end, 1) for start, end in others])
    ends = [-1, -1]
    for start, end, whose in events:
        if start < ends[1 - whose]:
            return True
        ends[whose] = max(ends[whose], end)
    return False


def _end(fill: Fill) -> int:
    return fill.offset + (fill.rows - 1) * fill.row_stride + (fill.cols - 1) * fill.col_stride + 1


def _lines(fill: Fill) -> list[tuple[int, int]]:
    """First element and end of each line along the smaller stride."""
    outer, inner = sorted([(fill.row_stride, fill.rows), (fill.col_stride, fill.cols)], reverse=True)
    length = (inner[1] - 1) * inner[0] + 1
    return [(fill.offset + i * outer[0], fill.offset + i * outer[0] + length) for i in range(outer[1])]
