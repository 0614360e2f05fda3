"""What a serving rank receives of every version: parcels, and where their rectangles lie in the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megasync.layout.engine_layout import Fill

FULL, DELTA = 0, 1
# The tag of the table of digests that ends a transfer without headers.
TABLE = 2**30
# The tag of a receiver's answer to a whole version: its digest (signed), and microseconds that it spent on digests.
CONFIRMED = TABLE + 1
CONFIRMED_WORDS = 2


class Header(NamedTuple):
    """Goes ahead of each parcel as int64 words, where its size is not known before or it is used at once.

    ``nbytes`` is of the payload, ``digest`` (signed) of the whole parcel.
    """

    kind: int
    nbytes: int
    changed: int
    digest: int


@dataclass(frozen=True)
class Place:
    """A rectangle of a parameter, in elements from the parameter's first."""

    param: str
    offset: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int

    def of(self, param: torch.Tensor) -> torch.Tensor:
        size, stride = (self.rows, self.cols), (self.row_stride, self.col_stride)
        return param.as_strided(size, stride, param.storage_offset() + self.offset)


@dataclass(frozen=True)
class Inbound:
    """A parcel as this rank sees it; ``start`` is its first byte in the arena."""

    tag: int
    source: int
    dtype: torch.dtype
    elements: int
    nbytes: int
    places: tuple[Place, ...]
    start: int

    def slots(self, message: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        """(rectangle of a parameter, the same rectangle of a message [nbytes] uint8) for all places."""
        values = message.view(self.dtype)
        start = 0
        for place in self.places:
            count = place.rows * place.cols
            yield place.of(params[place.param]), values[start : start + count].view(place.rows, place.cols)
            start += count


class Program:
    """What this rank receives of every version: the parcels of `shard_plan.receive_program`, and constant fillings."""

    def __init__(self, found: Mapping[str, Any], tp: int) -> None:
        self.digest: str = found["digest"]
        self.fills = tuple(Fill(*fill) for fill in found["fills"][tp])
        self.parcels: list[Inbound] = []
        self.nbytes = 0
        for parcel in found["parcels"][tp]:
            self.parcels.append(
                Inbound(
                    tag=parcel["tag"],
                    source=parcel["source"],
                    dtype=getattr(torch, parcel["dtype"]),
                    elements=parcel["elements"],
                    nbytes=parcel["nbytes"],
                    places=tuple(Place(*place) for place in parcel["places"]),
                    start=self.nbytes,
                )
            )
            self.nbytes += parcel["nbytes"]

    @property
    def params(self) -> set[str]:
        """The parameters that are written."""
        placed = {place.param for parcel in self.parcels for place in parcel.places}
        return placed | {fill.param for fill in self.fills}

    @property
    def confirmed_to(self) -> int:
        """The trainer rank that hears when all of a version is here and right."""
        return min(parcel.source for parcel in self.parcels)

    @property
    def largest(self) -> int:
        return max((parcel.nbytes for parcel in self.parcels), default=0)
