"""What NCCL can do and gloo cannot, built from what gloo can.

NCCL's all-gather and reduce-scatter of lists accept tensors of different sizes, which torch turns into broadcasts and
reductions. Megatron's dispatcher uses them when several ranks share an expert and got different numbers of tokens.
NCCL's messages may be waited for twice, as Transformer Engine's ring attention does; gloo's second wait never ends.
NCCL launches several collectives as one, which Transformer Engine asks for to gather values and scales in FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_all_gather = dist.all_gather
_reduce_scatter = dist.reduce_scatter
_coalescing_manager = distributed_c10d._coalescing_manager
_isend = dist.isend
_irecv = dist.irecv


def install() -> None:
    """Replaces these functions of torch.distributed in this process; equal sizes go to the original ones."""
    dist.all_gather = all_gather
    dist.reduce_scatter = reduce_scatter
    dist._coalescing_manager = coalescing_manager  # pyright: ignore[reportPrivateImportUsage]
    # `P2POp` compares with those of its own module.
    for module in (dist, distributed_c10d):
        vars(module).update(isend=isend, irecv=irecv)


class _Ended:
    """Collectives that ended one by one."""

    def wait(self) -> None: ...


@contextmanager
def coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
    """Replaces `torch.distributed._coalescing_manager`: with a device, each collective runs immediately."""
    if device is not None:
        yield _Ended()
        return
    with _coalescing_manager(group, device, async_ops) as manager:
        yield manager


class _Message:
    """A message under way, whose `wait` returns at once from the second time on."""

    def __init__(self, work: Any) -> None:
        self._work, self._over = work, False

    def wait(self, *args: Any) -> bool:
        self._over = self._over or self._work.wait(*args)
        return self._over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def isend(*args: Any, **kwargs: Any) -> _Message | None:
    """Replaces `torch.distributed.isend`: its message may be waited for repeatedly."""
    work = _isend(*args, **kwargs)
    return work and _Message(work)


def irecv(*args: Any, **kwargs: Any) -> _Message | None:
    """Replaces `torch.distributed.irecv`: its message may be waited for repeatedly."""
    work = _irecv(*args, **kwargs)
    return work and _Message(work)


def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Replaces `torch.distributed.all_gather`: tensors may have different sizes."""
    if _alike(tensor_list) or async_op:
        return _all_gather(tensor_list, tensor, group, async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for source, part in zip(_members(group), tensor_list, strict=True):
        dist.broadcast(part, source, group)
    return None


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """`torch.distributed.reduce_scatter` of tensors of possibly different sizes."""
    if _alike(input_list) or async_op:
        return _reduce_scatter(output, input_list, op, group, async_op)
    rank = dist.get_rank(group)
    for place, (target, part) in enumerate(zip(_members(group), input_list, strict=True)):
        total = part.clone()
        dist.reduce(total, target, op, group)
        if place == rank:
            output.copy_(total)
    return None


def _alike(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def _members(group: Any) -> list[int]:
    """Global ranks of a group, in order."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
