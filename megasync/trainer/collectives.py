"""Small collectives over all trainer ranks. Nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_agree(ok: bool, device: torch.device) -> bool:
    """True on every rank when ``ok`` is true on every rank."""
    flag = torch.tensor([float(ok)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def broadcast_json(value: Any, source: int, device: torch.device) -> Any:
    """Broadcasts a JSON value from rank ``source`` to every rank; other ranks' ``value`` is ignored."""
    sends = dist.get_rank() == source
    text = json.dumps(value).encode() if sends else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, source)
    buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if sends:
        buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(buffer, source)
    return json.loads(bytes(buffer.tolist()))


def first_failure(error: BaseException | None, device: torch.device) -> str | None:
    """None if no rank has an error, otherwise the error of the lowest failing rank; the same on every rank."""
    world = dist.get_world_size()
    failing = torch.tensor([world if error is None else dist.get_rank()], device=device)
    dist.all_reduce(failing, op=dist.ReduceOp.MIN)
    source = int(failing.item())
    if source == world:
        return None
    return broadcast_json(f"rank {source}: {type(error).__name__}: {error}", source, device)
