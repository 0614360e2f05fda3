"""Plain transfers over gloo between bare processes: the upper bound that the links of this machine allow.

There is no packing, digest, loading or control call: senders already hold the bytes, and receivers discard them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megasync.serving.process import free_port

# (sender, receiver, bytes). The numbers of receivers follow those of senders.
Message = tuple[int, int, int]


def _member(pipe: Connection, rank: int, world: int, port: int, messages: list[Message] | int) -> None:
    """The body of one process: answers each request with the duration of the transfer, in seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    if isinstance(messages, int):
        whole = torch.ones(messages, dtype=torch.uint8)

        def transfer() -> None:
            dist.broadcast(whole, src=0)

    else:
        mine = [(tag, message) for tag, message in enumerate(messages) if rank in message[:2]]
        buffers = [torch.ones(nbytes, dtype=torch.uint8) for _, (_, _, nbytes) in mine]

        def transfer() -> None:
            works = []
            for (tag, (source, target, _)), buffer in zip(mine, buffers, strict=True):
                if source == rank:
                    works.append(dist.isend(buffer, target, tag=tag))
                else:
                    works.append(dist.irecv(buffer, source, tag=tag))
            for work in works:
                work.wait()

    while pipe.recv():
        dist.barrier()
        start = time.monotonic()
        transfer()
        dist.barrier()
        pipe.send(time.monotonic() - start)
    dist.destroy_process_group()


class RawTransfer:
    """``world`` processes that broadcast a number of bytes from the first one, or exchange a list of messages."""

    def __init__(self, world: int, messages: Sequence[Message] | int) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        pairs = [context.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pairs]
        given = messages if isinstance(messages, int) else list(messages)
        self._processes = [
            context.Process(target=_member, args=(theirs, rank, world, port, given), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def measure(self) -> float:
        """Runs one transfer. Returns the time of the slowest process, in seconds."""
        for pipe in self._pipes:
            pipe.send(True)
        return max(pipe.recv() for pipe in self._pipes)

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join(10)
            process.kill()
