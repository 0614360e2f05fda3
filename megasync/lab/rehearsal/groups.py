"""Process groups of any size in one process: collectives that move nothing, on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d, new_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasync.lab.rehearsal.gloo import coalescing_manager

# Collectives of several tensors, for which torch has no implementation on the meta device.
_COALESCED = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_")


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Makes this process ``rank`` of ``world``. Each group that is created meanwhile has the members it should have."""
    _coalesced_on_meta()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with (
            patch.object(dist, "new_group", _new_group),
            patch.object(distributed_c10d, "new_group", _new_group),
            patch.object(dist, "is_backend_available", lambda name: True),
            patch.object(dist, "_coalescing_manager", coalescing_manager),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _new_group(*args: Any, **kwargs: Any) -> Any:
    """`torch.distributed.new_group`, on the fake backend also where Transformer Engine names another one."""
    return new_group(*args, **{**kwargs, "backend": None})


@cache
def _coalesced_on_meta() -> torch.library.Library:
    """Registered as long as the result lives: for the rest of the process."""
    library = torch.library.Library("c10d", "IMPL")
    for name in _COALESCED:
        library.impl(name, _done, "Meta")
    return library


def _done(*_: Any) -> Any:
    """The handle of a collective that has finished."""
    return FakeWork().boxed()
