"""Copies between strided views as nested loops, and rectangles out of such loops.

A `Loop` is one loop of a copy. Over a contiguous array each loop belongs to one dimension (`align`); the loops over a
matrix then give rectangles of rows and columns (`rectangles`). Integers only, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from megasync.layout.engine_layout import Fill, ParamRectangle, Slot
from megasync.layout.layout import Box


class Loop(NamedTuple):
    """One loop of a copy."""

    steps: int
    # What a step advances in the source, in elements (after `align` in positions), and in the target.
    source: int
    target: int


class NotRectangular(Exception):
    """The elements of a view are not a rectangle of the array that it views."""


def strides_of(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous array, in elements."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def position(offset: int, shape: Sequence[int]) -> list[int]:
    """The index of the element at ``offset`` of a contiguous array."""
    return [offset // stride % size for stride, size in zip(strides_of(shape), shape, strict=True)]


def align(loops: Iterable[Loop], offset: int, shape: Sequence[int]) -> list[list[Loop]]:
    """For each dimension of a contiguous array, the loops along it, outermost first; ``source`` counts positions.

    A loop over several dimensions is split. ``offset`` is that of the first element; no loop may have source 0.

    Raises NotRectangular when a loop crosses into another dimension partway.
    """
    strides, start = strides_of(shape), position(offset, shape)
    walks: list[list[Loop]] = [[] for _ in shape]
    pending = [loop for loop in loops if loop.steps > 1]
    while pending:
        loop = pending.pop()
        dim = next((d for d, stride in enumerate(strides) if shape[d] > 1 and loop.source % stride == 0), None)
        if dim is None:
            raise NotRectangular
        step = loop.source // strides[dim]
        if start[dim] + (loop.steps - 1) * step < shape[dim]:
            walks[dim].append(Loop(loop.steps, step, loop.target))
            continue
        inner = shape[dim] // step
        if shape[dim] % step or start[dim] >= step or loop.steps % inner:
            raise NotRectangular
        pending.append(Loop(inner, loop.source, loop.target))
        pending.append(Loop(loop.steps // inner, loop.source * inner, loop.target * inner))
    for dim, walk in enumerate(walks):
        if start[dim] + sum((loop.steps - 1) * loop.source for loop in walk) >= shape[dim]:
            raise NotRectangular
    return [merge(walk) for walk in walks]


def merge(loops: Iterable[Loop]) -> list[Loop]:
    """Fewer loops over the same elements, outermost (largest source step) first."""
    merged: list[Loop] = []
    for loop in sorted(loops, key=lambda loop: loop.source, reverse=True):
        outer = merged[-1] if merged else None
        if outer and (outer.source, outer.target) == (loop.source * loop.steps, loop.target * loop.steps):
            merged[-1] = Loop(outer.steps * loop.steps, loop.source, loop.target)
        else:
            merged.append(loop)
    return merged


def unrolled(loops: Sequence[Loop]) -> Iterator[tuple[int, int]]:
    """The offsets in source and target of each pass of nested loops."""
    for passes in product(*(range(loop.steps) for loop in loops)):
        pairs = list(zip(passes, loops, strict=True))
        yield sum(i * loop.source for i, loop in pairs), sum(i * loop.target for i, loop in pairs)


def clip(loops: Sequence[Loop], start: int, first: int, length: int) -> Iterator[tuple[int, list[Loop], int]]:
    """The part of loops along one dimension that lies within ``length`` positions from ``first`` on.

    Yields its first position relative to ``first``, its loops, and the target's offset there.
    """
    *outer, loop = loops or [Loop(1, 1, 0)]
    for source, target in unrolled(outer):
        distance = first - start - source
        low = max(0, -(-distance // loop.source))
        high = min(loop.steps, -(-(distance + length) // loop.source))
        if low < high:
            yield low * loop.source - distance, [Loop(high - low, *loop[1:])], target + low * loop.target


def rectangles(
    loops: Iterable[Loop], offset: int, shape: tuple[int, int], name: str, param: str, at: int
) -> list[Slot]:
    """The slots of a copy from element ``offset`` of a matrix ``name`` of ``shape`` to element ``at`` of ``param``."""
    (row, col), walks = position(offset, shape), align(loops, offset, shape)
    (row_loops, rows), (col_loops, cols) = map(_innermost, walks)
    return [
        Slot(
            name,
            Box(row + down, rows.steps, col + right, cols.steps),
            param,
            at + row_offset + col_offset,
            rows.target,
            cols.target,
        )
        for down, row_offset in unrolled(row_loops)
        for right, col_offset in unrolled(col_loops)
    ]


def _innermost(walk: list[Loop]) -> tuple[list[Loop], Loop]:
    """The loop that steps position by position, separate from the others."""
    if walk and walk[-1].source == 1:
        return walk[:-1], walk[-1]
    return walk, Loop(1, 1, 1)


def fill_rectangles(loops: Iterable[Loop], param: str, at: int, value: float) -> list[Fill]:
    """The fills of a constant written by ``loops`` from element ``at`` of ``param`` on; ignores sources."""
    walk = merge(Loop(loop.steps, loop.target, loop.target) for loop in loops if loop.steps > 1)
    *outer, rows, cols = [Loop(1, 0, 1), Loop(1, 0, 1), *walk]
    return [
        Fill(param, at + offset, rows.steps, cols.steps, rows.target, cols.target, value)
        for _, offset in unrolled([loop for loop in outer if loop.steps > 1])
    ]


def coalesce(slots: Iterable[Slot]) -> list[Slot]:
    """The same slots with neighbours merged, in the order of their tensors' names."""
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
    return slot._replace(hf_box=slot.hf_box.transposed(), row_stride=slot.col_stride, col_stride=slot.row_stride)


def _plain(slot: Slot) -> Slot:
    """The slot with the strides of single rows and columns normalised, so that equal slots compare equal."""
    box = slot.hf_box
    col_stride = slot.col_stride if box.cols > 1 else 1
    return slot._replace(col_stride=col_stride, row_stride=slot.row_stride if box.rows > 1 else box.cols * col_stride)


def overlap(a: ParamRectangle, b: ParamRectangle) -> bool:
    """Whether two rectangles of one parameter overlap, as sets of lines."""
    if a.last < b.offset or b.last < a.offset:
        return False
    lines, others = _lines(a), _lines(b)
    events = sorted([(start, end, 0) for start, end in lines] + [(start, end, 1) for start, end in others])
    ends = [-1, -1]
    for start, end, owner in events:
        if start < ends[1 - owner]:
            return True
        ends[owner] = max(ends[owner], end)
    return False


def _lines(place: ParamRectangle) -> list[tuple[int, int]]:
    """First element and end of each line along the smaller stride."""
    outer, inner = sorted([(place.row_stride, place.rows), (place.col_stride, place.cols)], reverse=True)
    length = (inner[1] - 1) * inner[0] + 1
    return [(place.offset + i * outer[0], place.offset + i * outer[0] + length) for i in range(outer[1])]
