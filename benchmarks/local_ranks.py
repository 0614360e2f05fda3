"""Trainer ranks as plain processes that only hold shards, for weight syncs without Megatron and Ray.

`LocalRanks` replaces `TrainerRanks` in the driver. Run as a script, this file imports torch once and forks the ranks.
Each has a socket: a line that it reads is a call, a line that it writes a result. Both are pickled and base64-encoded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasync.concurrency.orphans import end_with_parent
from megasync.errors import SyncError
from megasync.layout.topology import Topology

if TYPE_CHECKING:
    from megasync.layout.layout import Layout

# Maximum length of a rank's reply line, in bytes.
LINE_BYTES = 2**24
# Delay of a read that the "slow" trap slows down, in seconds.
SLOW_SECONDS = 3.0


def to_line(message: object) -> bytes:
    return base64.b64encode(pickle.dumps(message)) + b"\n"


def from_line(line: bytes) -> Any:
    return pickle.loads(base64.b64decode(line))


class LocalRanks:
    """One process per rank of ``topology``. Each holds its shards of the weights in a Hugging Face folder."""

    def __init__(
        self, parent: asyncio.subprocess.Process, links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> None:
        self._parent, self._links = parent, links
        self.pids: list[int] = []
        self._waiting: list[dict[int, asyncio.Future]] = [{} for _ in links]
        self._ids = itertools.count()
        self._readers = [asyncio.create_task(self._read(rank)) for rank in range(len(links))]

    @classmethod
    async def start(
        cls,
        folder: Path,
        topology: Topology,
        bucket_bytes: int,
        dtype: str = "float32",
        script: str = __file__,
        device: str = "cpu",
    ) -> LocalRanks:
        """Starts the ranks of ``script``; by default ranks that only hold shards, on a CPU or ``device`` cuda."""
        settings = {
            "folder": str(folder),
            "topology": asdict(topology),
            "bucket_bytes": bucket_bytes,
            "dtype": dtype,
            "device": device,
        }
        pairs = [socket.socketpair() for _ in range(topology.world)]
        theirs = [pair[1].fileno() for pair in pairs]
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, script, json.dumps(settings), json.dumps(theirs)),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=theirs,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        for _, end in pairs:
            end.close()
        ranks = cls(parent, [await asyncio.open_connection(sock=end, limit=LINE_BYTES) for end, _ in pairs])
        ranks.pids = await ranks.call("ready", timeout=120)
        return ranks

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """Calls a method on all ranks. Returns results in rank order; raises the first failure as SyncError."""
        calls = (self.call_one(rank, method, *args, timeout=timeout) for rank in range(len(self._links)))
        return await asyncio.gather(*calls)

    async def on_all(self, timeout: float, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of `SendingRank` on all ranks, as `TrainerRanks`. No argument is passed by name."""
        assert not kwargs
        return await self.call(method.__name__, *args, timeout=timeout)

    async def call_one(self, rank: int, method: str, *args: Any, timeout: float) -> Any:
        answer = asyncio.get_running_loop().create_future()
        if self._readers[rank].done():
            raise SyncError(f"trainer rank {rank} is dead")
        number = next(self._ids)
        self._waiting[rank][number] = answer
        self._links[rank][1].write(to_line((number, method, args)))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise SyncError(f"trainer rank {rank} did not finish {method} within {timeout:g} s") from None

    async def _read(self, rank: int) -> None:
        waiting, (answers, _) = self._waiting[rank], self._links[rank]
        with contextlib.suppress(ConnectionResetError):
            while line := await answers.readline():
                number, error, result = from_line(line)
                answer = waiting.pop(number)
                if answer.done():
                    continue
                if error:
                    answer.set_exception(SyncError(error))
                else:
                    answer.set_result(result)
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(SyncError(f"trainer rank {rank} died"))

    async def stop(self) -> None:
        """Kills the parent, and with it the ranks."""
        if self._parent.returncode is None:
            self._parent.kill()
        await self._parent.wait()
        await asyncio.gather(*self._readers)
        for _, writer in self._links:
            writer.close()


class Params(dict):
    """A rank's parameters by name. `trap` is (name, kind): the next read of that parameter dies, is slow or raises."""

    trap: tuple[str, str] | None = None

    def __getitem__(self, name: str) -> Any:
        if self.trap and self.trap[0] == name:
            kind, self.trap = self.trap[1], None
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "raise":
                raise RuntimeError(f"{name} cannot be read")
            time.sleep(SLOW_SECONDS)
        return super().__getitem__(name)


class Rank:
    """One trainer rank: its shards and the senders of every transport."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from megasync.device import Device, set_cuda_environment
        from megasync.layout.layout import Layout
        from megasync.layout.model_files import read_hf_config
        from megasync.layout.shards import load_shards

        torch.set_num_threads(1)
        device = Device(settings["device"])
        if device.kind == "cuda":
            set_cuda_environment()
            torch.cuda.set_device(settings["rank"] % torch.cuda.device_count())
        layout = Layout(read_hf_config(settings["folder"]), Topology(**settings["topology"]))
        dtype = getattr(torch, settings["dtype"])
        self._read = lambda folder: load_shards(folder, layout, settings["rank"], dtype)
        loaded = self._read(settings["folder"])
        self._serve(layout, settings, Params({name: tensor.to(device.torch_device) for name, tensor in loaded.items()}))

    def _serve(self, layout: Layout, settings: dict[str, Any], params: Params) -> None:
        """Opens the senders of ``params``."""
        from megasync.device import Device
        from megasync.sync.broadcast.sender import BroadcastSender
        from megasync.sync.disk.writer import DiskWriter
        from megasync.sync.shard.sender import ShardSender
        from megasync.sync.stream import Shards

        self._layout, self._number, self._params = layout, settings["rank"], params
        device = Device(settings["device"])
        shards = Shards(layout, settings["dtype"], settings["rank"], self._params)
        plan = shards.plan(settings["bucket_bytes"])
        self._sender = BroadcastSender(plan, shards, device)
        self._writer = DiskWriter(plan, shards, device)
        self._shards = ShardSender(shards, settings["bucket_bytes"], device, "127.0.0.1")

    @cached_property
    def _gather(self) -> Any:
        from gather_sync import GatherPeer

        return GatherPeer(self._layout, self._number, self._params)

    def ready(self) -> int:
        """The process id. A reply means that the constructor has finished."""
        return os.getpid()

    def load(self, folder: str) -> None:
        for name, tensor in self._read(folder).items():
            self._params[name].copy_(tensor)

    def set_trap(self, param: str, kind: str) -> None:
        self._params.trap = (param, kind)
        # The sender caches what it has read; clear the cache so that the next sync reads the parameter again.
        for buffer in self._shards._buffers:
            buffer.copies.clear()

    def perturb(self, fraction: float) -> None:
        """Changes about this fraction of the elements, in place."""
        import torch

        for tensor in self._params.values():
            chosen = torch.rand(tensor.shape) < fraction
            tensor.add_(chosen.to(tensor.dtype) * 0.25 * torch.rand_like(tensor).add_(1))

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method.startswith("sync_"):
            return getattr(self._sender, method.removeprefix("sync_"))(*args)
        if method.startswith("shard_"):
            return getattr(self._shards, method.removeprefix("shard_"))(*args)
        if method.startswith("gather_"):
            return getattr(self._gather, method.removeprefix("gather_"))(*args)
        if method.startswith("disk_"):
            return getattr(self._writer, method.removeprefix("disk_"))(*args)
        return getattr(self, method)(*args)


def forked(sockets: list[int]) -> tuple[int, socket.socket]:
    """The number of a rank and its socket, in one fork per socket. This process waits for all forks and exits."""
    for rank, own in enumerate(sockets):
        if os.fork() == 0:
            end_with_parent()
            for other in sockets:
                if other != own:
                    os.close(other)
            return rank, socket.socket(fileno=own)
    for each in sockets:
        os.close(each)
    for _ in sockets:
        os.wait()
    sys.exit()


def main(kind: type[Rank] = Rank) -> None:
    """Runs one rank per socket. The arguments are settings and the sockets' numbers, as JSON."""
    settings, sockets = map(json.loads, sys.argv[1:])
    import megasync.sync.broadcast.sender
    import megasync.sync.disk.writer
    import megasync.sync.shard.sender  # noqa: F401

    number, link = forked(sockets)
    rank = kind({**settings, "rank": number})
    for line in link.makefile("rb"):
        number, method, args = from_line(line)
        try:
            answer = [number, None, rank.call(method, args)]
        except SyncError as error:
            answer = [number, str(error), None]
        link.sendall(to_line(answer))


if __name__ == "__main__":
    main()
