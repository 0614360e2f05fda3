"""Baseline weight sync: gathers each parameter and broadcasts it to the servers, which are paused meanwhile.

Each parameter is all-gathered over the tensor-parallel ranks and assembled into Hugging Face tensors, which are
broadcast one by one. Most systems started with this design; the implementation is not deliberately slow.

`GatherPeer` runs on every tensor-parallel rank, `GatherSync` in the driver. Supports one pipeline stage and one data
replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megasync.base.store import join_store, open_store
from megasync.device import Device
from megasync.layout.layout import Layout
from megasync.layout.shards import assemble
from megasync.serving.control import ServerControl
from megasync.sync.groups import Deadline, SyncGroup

GROUP = "gather"
SECONDS = 300.0


class GatherPeer:
    """The trainer rank's side: rank 0 gathers, assembles and broadcasts; the others contribute their shards."""

    def __init__(self, layout: Layout, rank: int, params: Mapping[str, torch.Tensor]) -> None:
        self._layout = layout
        self._rank = rank
        self._params = params
        # Names of Hugging Face tensors by the parameter that contains them, in the order of the parameters.
        self._names: dict[str, list[str]] = {}
        for name, holders in layout.holders.items():
            self._names.setdefault(holders[0].piece.param, []).append(name)

    def listen(self) -> tuple[str, int] | None:
        if self._rank:
            return None
        self._store = open_store("127.0.0.1", SECONDS)
        return "127.0.0.1", self._store.port

    def join(self, address: tuple[str, int], engine_ranks: int) -> None:
        ranks = self._layout.topology.world
        store = self._store if self._rank == 0 else join_store(*address, SECONDS)
        # Any: torch's stubs lack the methods of the class.
        self._peers: Any = dist.ProcessGroupGloo(
            PrefixStore("peers", store), self._rank, ranks, timedelta(seconds=SECONDS)
        )
        if self._rank == 0:
            self._engines = SyncGroup(store, GROUP, 0, 1 + engine_ranks, Device("cpu").backend, SECONDS, SECONDS)

    def send(self) -> None:
        ranks = self._layout.topology.world
        for param, names in self._names.items():
            shard = self._params[param]
            shards = [torch.empty_like(shard) for _ in range(ranks)]
            self._peers.allgather([shards], [shard]).wait()
            for name in names:
                whole = assemble(name, self._layout, lambda rank, _: shards[rank])  # noqa: B023
                if self._rank == 0:
                    self._engines.broadcast(whole, Deadline(SECONDS))


class GatherSync:
    """The driver's side: pauses the servers, starts the transfer and resumes them."""

    def __init__(self, ranks, servers: Sequence[ServerControl], layout: Layout, dtype: str, engine_tp: int) -> None:
        self._ranks, self._servers, self._dtype, self._engine_tp = ranks, servers, dtype, engine_tp
        order: dict[str, list[str]] = {}
        for name, holders in layout.holders.items():
            order.setdefault(holders[0].piece.param, []).append(name)
        self._tensors = [(name, list(layout.hf_tensors[name])) for names in order.values() for name in names]

    async def connect(self) -> None:
        address = (await self._ranks.call("gather_listen", timeout=SECONDS))[0]
        engine_ranks = len(self._servers) * self._engine_tp
        bodies = [
            {
                "master_address": address[0],
                "master_port": address[1],
                "rank_offset": 1 + index * self._engine_tp,
                "world_size": 1 + engine_ranks,
                "group_name": GROUP,
                "backend": "gloo",
            }
            for index in range(len(self._servers))
        ]
        await asyncio.gather(
            self._ranks.call("gather_join", address, engine_ranks, timeout=SECONDS),
            *(
                server.post("/init_weights_update_group", body, timeout=SECONDS)
                for server, body in zip(self._servers, bodies, strict=True)
            ),
        )

    async def publish(self, version: int) -> tuple[float, float]:
        """Returns (total seconds, seconds for which servers are paused)."""
        start = time.monotonic()
        await self._all("/pause_generation", {"mode": "in_place"})
        await self._all("/begin_weight_update", {})
        sending = asyncio.ensure_future(self._ranks.call("gather_send", timeout=SECONDS))
        for name, shape in self._tensors:
            body = {"names": [name], "dtypes": [self._dtype], "shapes": [shape], "group_name": GROUP}
            if name == self._tensors[-1][0]:
                body["weight_version"] = str(version)
            await self._all("/update_weights_from_distributed", body | {"flush_cache": False})
        await sending
        await self._all("/end_weight_update", {})
        await self._all("/continue_generation", {"torch_empty_cache": False})
        seconds = time.monotonic() - start
        return seconds, seconds

    async def close(self) -> None:
        await self._all("/destroy_weights_update_group", {"group_name": GROUP})

    async def _all(self, path: str, body: dict) -> None:
        await asyncio.gather(*(server.post(path, body, timeout=SECONDS) for server in self._servers))
