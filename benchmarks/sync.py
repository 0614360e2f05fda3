"""Weight sync on this machine: megasync's transports, a gathering baseline, and plain transfers of the same bytes.

    python benchmarks/sync.py MODEL [--tensor 2] [--servers 1] [--engine-tensor 1] [--dtype bfloat16] [--rounds 5]
    python benchmarks/sync.py --random-gb 1.0 ...        a random Llama of that size instead of MODEL

MODEL is a Hugging Face folder. Real SGLang servers receive weights from trainer ranks that only hold shards, all on
this machine's CPU; with `--device cuda`, p2p alone, over NCCL between GPUs. Methods alternate within each round; the
first round is a warm-up, and the tables show medians. "paused" is the time during which a server generates nothing.
`--traffic N` keeps N requests running on each server. `--deltas` also measures syncs after 1 %, 10 % and all of the
elements have changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from gather_sync import GatherSync
from local_ranks import LocalRanks
from random_model import make_random_model
from raw_transfer import RawTransfer

from megasync.config.schema import RolloutConfig, SyncConfig, TimeoutConfig
from megasync.device import BACKENDS, Device
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.serving.control import ServerControl
from megasync.serving.plugin_control import PluginControl
from megasync.serving.server import ServerSpec, SGLangServer
from megasync.sync.broadcast.plan import plan_broadcast
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.sync.shard.plan import ShardPlan, plan_shards
from megasync.sync.shard.sync import ShardSync

CHANGED = (0.01, 0.1, 1.0)
# Number of tokens in the request that times a decoding step.
STEPS = 16

# version -> (total seconds, seconds paused)
Publish = Callable[[int], Awaitable[tuple[float, float]]]


class Bench:
    """One set of servers and trainer ranks, and every method to transfer weights between them."""

    def __init__(self, args: argparse.Namespace, folder: Path, logs: Path) -> None:
        self.args = args
        self.folder = folder
        self.logs = logs
        self.topology = Topology(tensor=args.tensor, pipeline=args.pipeline)
        self.layout = Layout(json.loads((folder / "config.json").read_text()), self.topology)
        self.bucket_bytes = args.bucket_mb * 2**20
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.still: dict[str, list[float]] = defaultdict(list)
        self.notes: dict[str, list[float]] = defaultdict(list)
        self.memory: dict[str, tuple[float, float]] = {}

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            ways = await self._ways(stack)
            version = 0
            for round_ in range(self.args.rounds + 1):
                for name, publish in ways.items():
                    version += 1
                    found = await self._measured(name, publish, version)
                    if round_:
                        self.seconds[name].append(found[0])
                        self.still[name].append(found[1])
            if self.args.deltas:
                await self._deltas(version)

    async def _start(self, stack: AsyncExitStack) -> None:
        rollout = RolloutConfig(
            tensor_parallel=self.args.engine_tensor,
            context_length=2048,
            max_total_tokens=8192,
            max_running_requests=16,
            mem_fraction=0.5,
            server_args={"--skip-tokenizer-init": True},
        )
        dtype, folder = self.args.dtype, self.folder
        servers = [
            SGLangServer(
                ServerSpec(folder, self._with_gpus(rollout, index), dtype, self.args.device),
                *("127.0.0.1", 0, self.logs / f"{index}.log"),
            )
            for index in range(self.args.servers)
        ]
        self.ranks = await LocalRanks.start(folder, self.topology, self.bucket_bytes, dtype, device=self.args.device)
        stack.push_async_callback(self.ranks.stop)
        self.controls = []
        for server in servers:
            stack.push_async_callback(server.stop, 10)
            self.controls.append(ServerControl(await server.start(600)))
            stack.push_async_callback(self.controls[-1].close)

    def _with_gpus(self, rollout: RolloutConfig, index: int) -> RolloutConfig:
        """The server's GPUs follow the ranks' and the earlier servers', and begin again where there are no more."""
        if self.args.device == "cpu":
            return rollout
        import torch

        first = (self.topology.world + index * rollout.tensor_parallel) % torch.cuda.device_count()
        return replace(rollout, server_args={**rollout.server_args, "--base-gpu-id": first})

    async def _ways(self, stack: AsyncExitStack) -> dict[str, Publish]:
        """Connects every method, plain transfers first. Returns them by name."""
        shards = self._shard_sync(SyncConfig(pause_mode=self.args.pause))
        await shards.connect()
        stack.push_async_callback(shards.close)
        engine = await PluginControl(self.controls[0]).trace(list(self.layout.hf_tensors.items()))
        self.plan = plan_shards(self.layout, engine, self.bucket_bytes, self.args.dtype)
        self.needed = self.args.servers * sum(rank_bytes(rank, self.args.dtype) for rank in engine)

        async def by_shards(version: int) -> tuple[float, float]:
            report = await shards.publish(version)
            for part in (
                "connect",
                "join",
                "stage",
                "pack",
                "wire",
                "confirm",
                "digest",
                "running_step",
                "copy",
                "resume",
            ):
                self.notes[f"p2p, {part}"].append(report.seconds.get(part, 0.0))
            return report.seconds["stage"] + report.seconds["commit"], report.seconds["pause"]

        if self.args.device == "cuda":
            return {"p2p": by_shards}
        links = RawTransfer(self.topology.world + self.args.servers * len(engine), self._messages(self.plan))
        stack.callback(links.stop)
        plan = plan_broadcast(self.layout, self.bucket_bytes, self.args.dtype)
        whole = RawTransfer(1 + self.args.servers * len(engine), plan.nbytes)
        stack.callback(whole.stop)
        broadcast = BroadcastSync(
            self.controls,
            self.ranks,
            plan,
            len(engine),
            SyncConfig(pause_mode=self.args.pause),
            TimeoutConfig(),
            Device("cpu"),
        )
        await broadcast.connect()
        stack.push_async_callback(broadcast.close)

        async def raw_links(version: int) -> tuple[float, float]:
            return twice(await asyncio.to_thread(links.measure))

        async def raw_broadcast(version: int) -> tuple[float, float]:
            return twice(await asyncio.to_thread(whole.measure))

        async def by_broadcast(version: int) -> tuple[float, float]:
            report = await broadcast.publish(version)
            return twice(report.seconds["pause"])

        ways: dict[str, Publish] = {
            "plain messages, same bytes as p2p": raw_links,
            "plain broadcast, same bytes as broadcast": raw_broadcast,
            "p2p": by_shards,
            "broadcast": by_broadcast,
        }
        if self.args.only:
            return {name: way for name, way in ways.items() if name.endswith(self.args.only)}
        if self.args.pipeline == 1:
            gather = GatherSync(self.ranks, self.controls, self.layout, self.args.dtype, len(engine))
            await gather.connect()
            stack.push_async_callback(gather.close)
            ways["gather each, broadcast each"] = gather.publish
        return ways

    def _shard_sync(self, config: SyncConfig) -> ShardSync:
        config.bucket_mb = self.args.bucket_mb
        backend = BACKENDS[self.args.device]
        return ShardSync(self.controls, self.ranks, self.layout, self.args.dtype, backend, config, TimeoutConfig())

    def _messages(self, plan: ShardPlan) -> list[tuple[int, int, int]]:
        world = self.topology.world
        return [
            (bucket.source, world + server * plan.engine_ranks + bucket.target, bucket.nbytes)
            for bucket in plan.buckets
            for server in range(self.args.servers)
        ]

    async def _measured(self, name: str, publish: Publish, version: int) -> tuple[float, float]:
        traffic = []
        if not name.startswith("plain") and self.args.traffic:
            traffic = [
                asyncio.create_task(self._generate(control))
                for control in self.controls
                for _ in range(self.args.traffic)
            ]
            await asyncio.sleep(2.0)
            self.notes["a decoding step"].append(await self._step_seconds())
        before = peak_megabytes(self.ranks.pids, reset=True)
        found = await publish(version)
        after = peak_megabytes(self.ranks.pids)
        self.memory[name] = (max(before), max(b - a for a, b in zip(before, after, strict=True)))
        for task in traffic:
            task.cancel()
        await asyncio.gather(*traffic, return_exceptions=True)
        for control in self.controls if traffic else ():
            await control.post("/abort_request", {"abort_all": True})
        return found

    async def _generate(self, control: ServerControl, tokens: int = 1500) -> None:
        parameters = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
        await control.post("/generate", {"input_ids": [1, 10, 11, 12], "sampling_params": parameters}, timeout=600)

    async def _step_seconds(self) -> float:
        """Duration of one decoding step under the current load, in seconds, measured with an additional request."""
        start = time.monotonic()
        await self._generate(self.controls[0], STEPS)
        return (time.monotonic() - start) / STEPS

    async def _deltas(self, version: int) -> None:
        sync = self._shard_sync(SyncConfig(pause_mode=self.args.pause, delta=True, delta_full_every=0))
        full = (await sync.publish(version + 1)).bytes
        print("\n| elements changed | bytes, of a full sync | stage, s | paused, s |\n|---|---|---|---|")
        for fraction in CHANGED:
            found = []
            for _ in range(self.args.rounds):
                await self.ranks.call("perturb", fraction, timeout=60)
                version += 1
                report = await sync.publish(version + 1)
                found.append((report.bytes / full, report.seconds["stage"], report.seconds["pause"]))
            share, stage, pause = (statistics.median(column) for column in zip(*found, strict=True))
            print(f"| {fraction:.0%} | {share:.1%} | {stage:.3f} | {pause:.3f} |")
        await sync.close()

    def report(self) -> str:
        args = self.args
        wire, least = self.plan.nbytes * args.servers, self.needed
        base = {
            "p2p": "plain messages, same bytes as p2p",
            "broadcast": "plain broadcast, same bytes as broadcast",
            "gather each, broadcast each": "plain broadcast, same bytes as broadcast",
        }
        lines = [
            f"{self.folder.name}, {args.dtype}: trainer TP{args.tensor} PP{args.pipeline}, {args.servers} server(s) of "
            + f"TP{args.engine_tensor}, messages of at most {args.bucket_mb} MiB, {args.traffic} requests running on "
            + f"each server, medians of {args.rounds}",
            f"p2p: {wire / 1e6:.0f} MB on the wire, {wire / least:.4f} of what the servers' ranks keep",
            "",
            "| | seconds | × plain | paused, s | extra memory of a rank, MB |",
            "|---|---|---|---|---|",
        ]
        for name, seconds in self.seconds.items():
            median = statistics.median(seconds)
            plain = statistics.median(self.seconds.get(base.get(name, name)) or [median])
            still = f"{statistics.median(self.still[name]):.3f}" if name in base else ""
            extra = f"{self.memory[name][1]:.0f}" if name in base else ""
            lines.append(f"| {name} | {median:.3f} | {median / plain:.2f} | {still} | {extra} |")
        for name, seconds in self.notes.items():
            lines.append(f"| {name} | {statistics.median(seconds[1:]):.3f} | | | |")
        return "\n".join(lines)


def twice(seconds: float) -> tuple[float, float]:
    """A transfer during which servers are paused from its beginning to its end."""
    return seconds, seconds


def rank_bytes(rank, dtype: str) -> int:
    """Bytes of all weights that an engine rank keeps, in the trainer's dtype."""
    item = {"float32": 4, "bfloat16": 2}[dtype]
    return item * sum(slot.hf_box.rows * slot.hf_box.cols for slot in rank.slots)


def peak_megabytes(pids: list[int], reset: bool = False) -> list[float]:
    """Peak resident memory of each process since the last reset, in MB. ``reset`` first resets it to current usage."""
    found = []
    for pid in pids:
        if reset:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        status = Path(f"/proc/{pid}/status").read_text()
        found.append(int(status.split("VmHWM:")[1].split()[0]) / 1000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--random-gb", type=float, help="size of a random model, in 10^9 bytes")
    for name, default in (("servers", 1), ("engine-tensor", 1), ("tensor", 2), ("pipeline", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("bucket-mb", 16), ("rounds", 5), ("traffic", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pause", choices=["in_place", "retract", "abort"], default="in_place")
    parser.add_argument("--deltas", action="store_true")
    parser.add_argument("--only", choices=["p2p", "broadcast"], help="this method, and plain transfers beside it")
    args = parser.parse_args()
    if (args.model is None) == (args.random_gb is None):
        parser.error("give either a model folder or --random-gb")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        folder = Path(args.model) if args.model else make_random_model(scratch / "random", args.random_gb, args.dtype)
        bench = Bench(args, folder, scratch)
        start = time.monotonic()
        asyncio.run(bench.run())
        print(bench.report() + f"\n\n{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
