"""Random weights of a layout, whole and as trainer ranks hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from megasync.layout.layout import Layout
from megasync.layout.shards import box_of, describe, piece_of, save_written


def random_weights(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in layout.hf_tensors.items()}


def shards_of(layout: Layout, rank: int, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A trainer rank's shards of the given Hugging Face tensors. Vocabulary padding is NaN, to reveal its use."""
    shards = {name: torch.full(shape, torch.nan) for name, shape in layout.params(rank).items()}
    for piece in layout.pieces(rank):
        piece_of(shards[piece.param], piece).copy_(box_of(whole[piece.hf_name], piece.hf_box))
    return shards


def write_checkpoint(
    path: Path, layout: Layout, shards: Callable[[int], dict[str, torch.Tensor]], dtype: str = "float32"
) -> Path:
    """A checkpoint of the shards that each rank holds."""
    path.mkdir()
    for rank in range(layout.topology.world):
        save_written(path, layout, rank, shards(rank))
    (path / "layout.json").write_text(json.dumps(describe(layout, dtype)))
    return path
