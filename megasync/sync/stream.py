"""Whole Hugging Face tensors out of shards, one after another, on every trainer rank.

Every rank must take every tensor, in step with the others: a bucket is put together by collectives, each of which ends
before the next begins. Besides the model there is one bucket of memory and one rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from megasync.sync.broadcast_plan import BroadcastPlan, Bucket
from megasync.sync.layout import Piece
from megasync.sync.shards import box_of


def stream_tensors(
    plan: BroadcastPlan, rank: int, params: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a Hugging Face checkpoint, in the order of the plan, on the device of the parameters.

    Args:
        plan: whose ranks are those of the default process group.
        rank: this process's.
        params: its live parameters by name.
    """
    for bucket in plan.buckets:
        yield from _assemble(bucket, rank, params).items()


@torch.no_grad()
def _assemble(bucket: Bucket, rank: int, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dtype, device = getattr(torch, bucket.dtype), next(iter(params.values())).device
    whole = {entry.name: torch.empty(entry.shape, dtype=dtype, device=device) for entry in bucket.tensors}
    for owner, pieces in bucket.contributions.items():
        if owner == rank:
            part = torch.cat([_held(piece, params).to(dtype).flatten() for piece in pieces])
        else:
            part = torch.empty(sum(_count(piece) for piece in pieces), dtype=dtype, device=device)
        if dist.get_world_size() > 1:
            dist.broadcast(part, owner)
        for piece, values in zip(pieces, part.split([_count(piece) for piece in pieces]), strict=True):
            target = box_of(whole[piece.hf_name], piece.hf_box)
            target.copy_(values.view(target.shape))
    return whole


def _held(piece: Piece, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return box_of(params[piece.param].detach(), piece.param_box)


def _count(piece: Piece) -> int:
    return piece.hf_box.rows * piece.hf_box.cols
