"""Which rectangle of which Hugging Face tensor a serving rank keeps, and where: the engine's side of the plan.

A `Slot` is found by tracing the engine's own loader (`sync.trace`), so nothing here knows a model family. Tensors of
more than two dimensions count as matrices of their first dimension by all the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from megasync.layout.layout import Box


class Slot(NamedTuple):
    """Box ``hf_box`` of a Hugging Face tensor is kept in ``param``: its element (row, col), counted from the box's
    first, lies ``offset + row * row_stride + col * col_stride`` elements behind the parameter's first."""

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


class Fill(NamedTuple):
    """A rectangle of ``param`` that the loader sets to a constant (padding of heads or of the vocabulary)."""

    param: str
    offset: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    value: float


@dataclass(frozen=True)
class EngineRank:
    """Everything that loading a checkpoint writes on one serving rank.

    ``dtypes`` and ``sizes`` (elements) are of every parameter; ``unwritten`` names those that loading leaves alone.
    """

    slots: tuple[Slot, ...]
    fills: tuple[Fill, ...]
    dtypes: Mapping[str, str]
    sizes: Mapping[str, int]
    unwritten: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "slots": [list(slot._replace(hf_box=list(slot.hf_box))) for slot in self.slots],
            "fills": [list(fill) for fill in self.fills],
            "dtypes": dict(self.dtypes),
            "sizes": dict(self.sizes),
            "unwritten": list(self.unwritten),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        return cls(
            slots=tuple(Slot(name, Box(*box), *rest) for name, box, *rest in found["slots"]),
            fills=tuple(Fill(*fill) for fill in found["fills"]),
            dtypes=dict(found["dtypes"]),
            sizes=dict(found["sizes"]),
            unwritten=tuple(found["unwritten"]),
        )

    def digest(self) -> str:
        """Equal for ranks that keep the same rectangles at the same places."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
