"""Seconds of a weight sync by phase, against a plain gloo broadcast of the same bytes to as many processes.

    python benchmarks/sync.py MODEL [--servers 2] [--tensor 1] [--pipeline 1] [--bucket-mb 64] [--rounds 5] [--pause retract]

MODEL is a Hugging Face folder. Real SGLang servers on this machine's CPU receive from trainer ranks that only hold
shards. Rounds of both kinds alternate, after one of each that is not counted; the table shows medians. The peer moves
bytes from one process to the others and does nothing else: no gathering, no packing, no loading, no control calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from local_ranks import LocalRanks

from megasync.config.schema import RolloutConfig, SyncConfig, TimeoutConfig
from megasync.device import Device
from megasync.rollout.control import ServerControl
from megasync.rollout.ports import free_port
from megasync.rollout.server import SGLangServer
from megasync.sync.attempt import SyncReport
from megasync.sync.broadcast_plan import plan_broadcast
from megasync.sync.broadcast_sync import BroadcastSync
from megasync.sync.layout import Layout
from megasync.sync.topology import Topology

PHASES = ("pause", "flush", "begin", "transfer", "end", "verify", "continue")


def raw_process(pipe: Connection, rank: int, world: int, port: int, nbytes: int) -> None:
    """One member of the plain broadcast; answers each request with its seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    message = torch.zeros(nbytes, dtype=torch.uint8)
    while pipe.recv():
        dist.barrier()
        start = time.monotonic()
        dist.broadcast(message, src=0)
        dist.barrier()
        pipe.send(time.monotonic() - start)
    dist.destroy_process_group()


class RawBroadcast:
    """Processes that broadcast ``nbytes`` from the first to the ``receivers`` others."""

    def __init__(self, nbytes: int, receivers: int) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        pairs = [context.Pipe() for _ in range(1 + receivers)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=raw_process, args=(theirs, rank, 1 + receivers, port, nbytes), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def measure(self) -> float:
        """Seconds of one broadcast, the slowest process's."""
        for pipe in self._pipes:
            pipe.send(True)
        return max(pipe.recv() for pipe in self._pipes)

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join(10)
            process.kill()


async def measure(args: argparse.Namespace) -> tuple[list[SyncReport], list[float], int]:
    """(sync reports, seconds of plain broadcasts, buckets)."""
    folder, topology = Path(args.model), Topology(tensor=args.tensor, pipeline=args.pipeline)
    config = json.loads((folder / "config.json").read_text())
    plan = plan_broadcast(Layout(config, topology), args.bucket_mb * 2**20, args.dtype)
    rollout = RolloutConfig(
        context_length=512,
        max_total_tokens=4096,
        max_running_requests=16,
        server_args={"--skip-tokenizer-init": True},
    )
    with tempfile.TemporaryDirectory() as logs:
        servers = [
            SGLangServer(folder, rollout, args.dtype, "cpu", "127.0.0.1", 0, Path(logs) / f"{index}.log")
            for index in range(args.servers)
        ]
        controls: list[ServerControl] = []
        raw = RawBroadcast(plan.nbytes, args.servers)
        ranks = await LocalRanks.start(folder, topology, args.bucket_mb * 2**20, args.dtype)
        try:
            controls = [ServerControl(await server.start(300)) for server in servers]
            pause = SyncConfig(pause_mode=args.pause)
            sync = BroadcastSync(controls, ranks, plan, 1, pause, TimeoutConfig(), Device("cpu"))
            await sync.connect()
            reports, seconds = [], []
            for version in range(args.rounds + 1):
                seconds.append(raw.measure())
                reports.append(await sync.publish(version))
            await sync.close()
        finally:
            raw.stop()
            await ranks.stop()
            await asyncio.gather(*(control.close() for control in controls))
            await asyncio.gather(*(server.stop(10) for server in servers))
    return reports[1:], seconds[1:], len(plan.buckets)


def table(reports: list[SyncReport], raw: list[float], buckets: int) -> str:
    peer = statistics.median(raw)
    lines = [
        f"{reports[0].bytes / 1e6:.0f} MB in {buckets} buckets, medians of {len(reports)}",
        "",
        "| | seconds | × plain broadcast |",
        "|---|---|---|",
    ]

    def row(name: str, seconds: float) -> None:
        lines.append(f"| {name} | {seconds:.3f} | {seconds / peer:.2f} |")

    row("plain broadcast", peer)
    for phase in PHASES:
        if phase in reports[0].seconds:
            row(phase, statistics.median(report.seconds[phase] for report in reports))
    row("all phases", statistics.median(sum(r.seconds[p] for p in PHASES if p in r.seconds) for r in reports))
    for part in ("pack", "wire"):
        row(f"of transfer, {part} (overlapping)", statistics.median(report.seconds[part] for report in reports))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("servers", 2), ("tensor", 1), ("pipeline", 1), ("bucket-mb", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--pause", choices=["in_place", "retract", "abort"], default="retract")
    print(table(*asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
