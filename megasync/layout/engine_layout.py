"""Which rectangle of which Hugging Face tensor a serving rank keeps, and where: the engine's side of the plan.

Slots come from tracing the engine's own loader (`layout.load_trace`), so nothing here knows a model family.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.errors import TraceError
from megasync.layout.layout import Box

if TYPE_CHECKING:
    import torch


class ParamRectangle(NamedTuple):
    """A strided rectangle of a parameter, in elements from the parameter's first."""

    param: str
    offset: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int

    def of(self, param: torch.Tensor) -> torch.Tensor:
        """The view [rows, cols] of the parameter, or of a tensor with the same storage layout."""
        size, stride = (self.rows, self.cols), (self.row_stride, self.col_stride)
        return param.as_strided(size, stride, int(param.storage_offset()) + self.offset)

    @property
    def last(self) -> int:
        """The last element of the parameter that the rectangle has."""
        return self.offset + (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride


class Slot(NamedTuple):
    """Box ``hf_box`` of a Hugging Face tensor is kept in ``param``.

    Element (row, col) of the box is element ``offset + row * row_stride + col * col_stride`` of the parameter.
    """

    hf_name: str
    hf_box: Box
    param: str
    offset: int
    row_stride: int
    col_stride: int

    def part(self, box: Box) -> Slot:
        """The slot of a box inside ``hf_box``."""
        rows, cols = box.row - self.hf_box.row, box.col - self.hf_box.col
        return self._replace(hf_box=box, offset=self.offset + rows * self.row_stride + cols * self.col_stride)

    @property
    def rectangle(self) -> ParamRectangle:
        """The slot's rectangle of its parameter."""
        box = self.hf_box
        return ParamRectangle(self.param, self.offset, box.rows, box.cols, self.row_stride, self.col_stride)


class Fill(NamedTuple):
    """A rectangle of ``param`` that the loader sets to a constant (padding of heads or of the vocabulary)."""

    param: str
    offset: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    value: float

    @property
    def rectangle(self) -> ParamRectangle:
        return ParamRectangle(*self[:-1])


@prepared
class EngineRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that loading a checkpoint writes on one serving rank."""

    slots: tuple[Slot, ...]
    fills: tuple[Fill, ...]
    # The dtype of every parameter.
    dtypes: dict[str, str]
    # The elements of every parameter.
    sizes: dict[str, int]
    # The parameters that loading leaves alone.
    unwritten: tuple[str, ...] = ()

    def without(self, frozen: Collection[str]) -> EngineRank:
        """The rank without the parameters that only ``frozen`` tensors fill, such as those of a vision tower.

        Raises TraceError for a parameter that other tensors fill as well.
        """
        if not frozen:
            return self
        kept = tuple(slot for slot in self.slots if slot.hf_name not in frozen)
        left = {slot.param for slot in self.slots if slot.hf_name in frozen}
        for slot in kept:
            if slot.param in left:
                raise TraceError(f"{slot.param!r} has {slot.hf_name!r} and also tensors that are not trained")
        return EngineRank(
            kept,
            tuple(fill for fill in self.fills if fill.param not in left),
            {name: dtype for name, dtype in self.dtypes.items() if name not in left},
            {name: size for name, size in self.sizes.items() if name not in left},
            self.unwritten,
        )

    def digest(self) -> str:
        """Equal for ranks that keep the same rectangles at the same places."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()
