"""Hooks into SGLang's own methods, through its plugin registry, and what every hook needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from megasync.errors import ServerError

log = logging.getLogger(__name__)

T = TypeVar("T")
# A hooked method of SGLang. It is passed on and called, never inspected.
Stock = Callable[..., Any]


def hook(kind: str, target: str, hook: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])


def parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def all_succeed(step: Callable[[], T], outcome: str) -> T:
    """Takes a step on each rank of the server. When it fails on any, all ranks raise the errors of all of them."""
    failure, result = "", None
    try:
        result = step()
    except Exception as error:
        log.exception("A weight update failed")
        failure = f"{type(error).__name__}: {error}"
    ranks = parallel()
    group = ranks.world_group if ranks.pp_size > 1 else ranks.tp_group
    failures = [text.decode() for text in gather(failure.encode(), group.cpu_group)]
    if any(failures):
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        raise ServerError(f"{outcome}: {reasons}")
    return cast(T, result)


def gather(data: bytes, group: Any) -> list[bytes]:
    """Gathers the value of each rank of CPU processes, in rank order; as tensors, because objects are pickled."""
    import torch
    import torch.distributed as dist

    size = torch.tensor([len(data)])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(map(int, sizes))
    padded = torch.frombuffer(bytearray(data.ljust(max(1, longest), b"\0")), dtype=torch.uint8)
    rows = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=group)
    return [row.numpy().tobytes()[: int(size)] for row, size in zip(rows, sizes, strict=True)]
