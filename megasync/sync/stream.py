"""Whole Hugging Face tensors out of shards, bucket by bucket.

Every trainer rank packs the parts of a bucket that it holds into one flat tensor. Whoever has all ranks' parts can
assemble the bucket's tensors; the plan says which ranks contribute to a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megasync.layout.layout import Layout, Piece
from megasync.layout.shards import box_of, piece_of
from megasync.sync.broadcast.plan import BroadcastPlan, Bucket, plan_broadcast


@dataclass(frozen=True)
class Shards:
    """A global trainer rank's live parameters by local name, their layout, and the dtype of the model."""

    layout: Layout
    dtype: str
    rank: int
    params: Mapping[str, torch.Tensor]

    def plan(self, bucket_bytes: int) -> BroadcastPlan:
        return plan_broadcast(self.layout, bucket_bytes, self.dtype)


def empty_tensors(bucket: Bucket, device: torch.device) -> dict[str, torch.Tensor]:
    """Uninitialised tensors for a bucket, by name."""
    dtype = getattr(torch, bucket.dtype)
    return {entry.name: torch.empty(entry.shape, dtype=dtype, device=device) for entry in bucket.tensors}


def empty_part(bucket: Bucket, rank: int, device: torch.device) -> torch.Tensor:
    """An uninitialised flat tensor for what a rank contributes to a bucket."""
    return torch.empty(sum(piece_elements(bucket, rank)), dtype=getattr(torch, bucket.dtype), device=device)


@torch.no_grad()
def pack_part(bucket: Bucket, shards: Shards, part: torch.Tensor) -> None:
    """Fills a flat tensor with what a rank contributes to a bucket, cast to the tensor's dtype."""
    pieces, lengths = bucket.contributions[shards.rank], piece_elements(bucket, shards.rank)
    for piece, target in zip(pieces, part.split(lengths), strict=True):
        values = held_piece(piece, shards.params)
        target.view(values.shape).copy_(values)


@torch.no_grad()
def place_part(bucket: Bucket, rank: int, part: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a rank's contribution to its places in the tensors of a bucket."""
    for piece, values in zip(bucket.contributions[rank], part.split(piece_elements(bucket, rank)), strict=True):
        target = box_of(tensors[piece.hf_name], piece.hf_box)
        target.copy_(values.view(target.shape))


def held_piece(piece: Piece, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The part of a parameter that a piece names; a view, detached."""
    return piece_of(params[piece.param].detach(), piece)


def piece_elements(bucket: Bucket, rank: int) -> list[int]:
    """Elements of each piece that a rank contributes to a bucket; empty when it contributes nothing."""
    return [piece.hf_box.rows * piece.hf_box.cols for piece in bucket.contributions.get(rank, ())]
