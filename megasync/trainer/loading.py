"""Weights from files into all data-parallel replicas: each shard is read by one rank, which sends it to the others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megasync.layout.layout import Layout
from megasync.layout.shards import dtypes_of
from megasync.trainer.checkpoint import run_collectively


def load_once(
    read: Callable[[Collection[str]], dict[str, torch.Tensor]],
    path: Path,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """All parameters of this rank, as CPU tensors. A collective over all ranks, whose process groups are open.

    Args:
        read: reads the parameters of this rank with these names below ``path``; raises CheckpointError.
        dtype: of what ``read`` returns, except of parameters with a dtype of their own.

    Raises CheckpointError on every rank if one of them could not read.
    """
    # Megatron does not annotate these.
    dense = cast(dist.ProcessGroup, parallel_state.get_data_parallel_group(with_context_parallel=True))
    experts = cast(dist.ProcessGroup, parallel_state.get_expert_data_parallel_group())
    groups = {item.param: dense if item.ep is None else experts for item in layout.of_rank(rank)}
    params: dict[str, torch.Tensor] = {}
    names = {name for name, group in groups.items() if group.rank() == 0}
    run_collectively(lambda: params.update(read(names)), "read", path, device)
    dtypes = dtypes_of(layout, rank, dtype)
    for name, shape in layout.params(rank).items():
        if groups[name].size() > 1:
            sent = (params[name] if name in names else torch.empty(shape, dtype=dtypes[name])).to(device)
            dist.broadcast(sent, dist.get_global_rank(groups[name], 0), group=groups[name])
            params[name] = sent.cpu()
    return params
