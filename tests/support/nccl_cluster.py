"""A whole publish over NCCL, as programs for a `fake_nccl.Machine`: real driver, senders and receivers, no GPUs.

`record_publishes` runs the real `ShardSync` with the real `ShardSender` of every trainer rank and the real
`ShardReceiver` of every engine rank, all in this process, on tensors without memory. What each of them does with NCCL
is recorded; the machine then executes it. So the order of operations is the code's own, written down nowhere else.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from fake_control import FakeControl
from fake_nccl import Action, Costs, Machine, Process
from fake_nccl_group import FakeNCCL, FakeStore, nccl, recording
from torch.overrides import TorchFunctionMode

from megasync.config.schema import SyncConfig, TimeoutConfig
from megasync.layout.engine_layout import EngineRank
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.broadcast.plan import ITEM_BYTES, plan_broadcast
from megasync.sync.broadcast.sender import BroadcastSender
from megasync.sync.broadcast.sync import BroadcastSync
from megasync.sync.messages import Empty, SendReport
from megasync.sync.shard import arena as shard_arena
from megasync.sync.shard import sender as shard_sender
from megasync.sync.shard import server as shard_server
from megasync.sync.shard import sync as shard_sync
from megasync.sync.shard.receiver import ShardReceiver
from megasync.sync.shard.sender import ShardSender
from megasync.sync.shard.sync import ShardSync
from megasync.sync.stream import Shards

# The benchmark has the models, and engines that shard as Megatron does.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from sync_model import QWEN3_32B as QWEN3_32B
from sync_model import engine_ranks

DTYPE = "bfloat16"
GPUS_PER_NODE = 8
# In the place of a GPU's memory and of pinned host memory.
GPU = torch.device("meta")


@dataclass(frozen=True)
class Case:
    """A trainer of ``trainer.world`` ranks and ``engines`` engines of ``tensor`` ranks each."""

    config: dict[str, Any]
    trainer: Topology
    tensor: int
    engines: int
    arena: str = "host"
    bucket_mb: int = 256

    def layers(self, count: int) -> Case:
        """The same case for a model of fewer layers."""
        return replace(self, config={**self.config, "num_hidden_layers": count})


@dataclass
class Cluster:
    """The programs of a case: by trainer rank, and by engine and its rank.

    ``queues`` are the hardware queues of a trainer rank: CUDA_DEVICE_MAX_CONNECTIONS of `megasync.device`.
    """

    case: Case
    trainer: list[list[Action]] = field(default_factory=list)
    engines: list[list[list[Action]]] = field(default_factory=list)
    queues: int = 1

    def processes(self) -> tuple[list[Process], list[list[Process]]]:
        """The processes on their nodes."""
        trainer = [
            Process(f"trainer rank {rank}", rank // GPUS_PER_NODE, self.queues) for rank in range(len(self.trainer))
        ]
        first = -(-len(trainer) // GPUS_PER_NODE)
        engines = [
            [
                Process(f"rank {tp} of engine {engine}", first + (engine * self.case.tensor + tp) // GPUS_PER_NODE)
                for tp in range(self.case.tensor)
            ]
            for engine in range(self.case.engines)
        ]
        return trainer, engines


class _Server(FakeControl):
    """A server of which only the receivers are real."""

    def __init__(self, url: str, ranks: Sequence[EngineRank], held: Sequence[Callable[[], Any]]) -> None:
        super().__init__(url)
        self.ranks = ranks
        self.receivers = [ShardReceiver(tp, params) for tp, params in enumerate(held)]
        self.programs: list[list[Action]] = [[] for _ in ranks]
        self.staged = asyncio.Event()


def _held(rank: EngineRank) -> Any:
    params = {name: torch.empty(size, dtype=torch.bfloat16, device=GPU) for name, size in rank.sizes.items()}
    return lambda: params


class _Control:
    """In the place of `PluginControl`: commands reach the receivers at once."""

    def __init__(self, server: _Server) -> None:
        self.server = server

    async def hello(self, timeout: float) -> list[Any]:
        return [SimpleNamespace(instance=f"{self.server.url}-{tp}") for tp in range(len(self.server.ranks))]

    async def trace(self, specs: Any, timeout: float) -> Sequence[EngineRank]:
        return self.server.ranks

    async def load(self, request: Any, version: str, flush: bool, timeout: float) -> None:
        self.server.version = version

    async def call(self, command: str, request: Any, answer: Any, timeout: float) -> list[Any]:
        answers = []
        for receiver, program in zip(self.server.receivers, self.server.programs, strict=True):
            with recording() as actions, _HostMemory() if command == "receive_plan" else nullcontext():
                answers.append(receiver.handle(command, msgspec.to_builtins(request)))
            if command == "stage":
                program.extend(actions)
        if command == "stage":
            self.server.staged.set()
        return answers


class _HostMemory(TorchFunctionMode):
    """Large host tensors take no memory either."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.zeros, torch.empty) and str(kwargs.get("device", "cpu")) == "cpu":
            kwargs = {**kwargs, "device": GPU, "pin_memory": False}
        return func(*args, **kwargs)


class _Ranks:
    """In the place of the trainer's ranks: calls each sender in turn."""

    def __init__(self, senders: Sequence[ShardSender], servers: Sequence[_Server]) -> None:
        self.senders, self.servers = senders, servers
        self.programs: list[list[Action]] = [[] for _ in senders]

    async def on_all(self, timeout: float, method: Callable[..., Any], *args: Any) -> list[Any]:
        name = method.__name__.removeprefix("shard_")
        if name != "send":
            return [getattr(sender, name)(*args) for sender in self.senders]
        for server in self.servers:
            await server.staged.wait()
            server.staged.clear()
        digests = {
            (server.url, tp): receiver.handle("poll", msgspec.to_builtins(Empty())).digest
            for server in self.servers
            for tp, receiver in enumerate(server.receivers)
        }
        reports = []
        for sender, program in zip(self.senders, self.programs, strict=True):
            with recording() as actions:
                report: SendReport = sender.send(*args)
            program.extend(actions)
            # What the receivers would have confirmed.
            confirmed = tuple(each._replace(digest=digests[each.url, each.engine_rank]) for each in report.confirmed)
            reports.append(msgspec.structs.replace(report, confirmed=confirmed))
        return reports


@contextmanager
def _shared_plans() -> Any:
    """Every rank plans the same, so it is done once."""
    plans: dict[Any, Any] = {}
    plan_shards = shard_sync.plan_shards

    def planned(layout: Layout, engine: Sequence[EngineRank], *args: Any) -> Any:
        key = (layout.topology, id(engine), tuple(map(str, args)))
        if key not in plans:
            plans[key] = plan_shards(layout, engine, *args)
        return plans[key]

    with ExitStack() as stack:
        for module in (shard_sync, shard_sender):
            stack.enter_context(mock.patch.object(module, "plan_shards", planned))
        yield


def _trainer(layout: Layout) -> Iterator[Shards]:
    """Each rank's parameters, without memory."""
    for rank in range(layout.topology.world):
        shapes = layout.params(rank).items()
        params = {name: torch.empty(shape, dtype=torch.bfloat16, device=GPU) for name, shape in shapes}
        yield Shards(layout, DTYPE, rank, params)


def _mark(programs: Sequence[list[Action]], what: str) -> None:
    """Threads have ended, and all processes meet."""
    for program in programs:
        program += [("rejoin", action[1]) for action in program if action[0] == "fork"]
        program += [("mark", f"before {what}"), ("set_key", what)]
        program += [("await_keys", what, len(programs), None), ("mark", what)]


def record_publishes(case: Case, count: int = 2) -> Cluster:
    """Programs of ``count`` publishes one after another; each process marks its time at the start of each."""
    layout = Layout(case.config, case.trainer)
    ranks = engine_ranks(case.config, Topology(tensor=case.tensor))
    device = SimpleNamespace(torch_device=GPU, backend="nccl")
    senders = [ShardSender(shards, case.bucket_mb * 2**20, device, "127.0.0.1") for shards in _trainer(layout)]

    async def publish() -> Cluster:
        servers = [_Server(f"http://engine-{index}", ranks, list(map(_held, ranks))) for index in range(case.engines)]
        trainer = _Ranks(senders, servers)
        config, timeouts = SyncConfig(arena=case.arena, bucket_mb=case.bucket_mb), TimeoutConfig()
        sync = ShardSync(servers, trainer, layout, DTYPE, "nccl", config, timeouts)
        programs = [*trainer.programs, *(program for server in servers for program in server.programs)]
        for version in range(1, count + 1):
            _mark(programs, f"publish {version}")
            await sync.publish(version)
        _mark(programs, "end")
        return Cluster(case, trainer.programs, [server.programs for server in servers])

    with (
        nccl(),
        _shared_plans(),
        mock.patch.object(shard_server, "PluginControl", _Control),
        # All of it is on the meta device, which has no other place for a host's memory.
        mock.patch.object(shard_arena, "_lands", lambda device, wire: case.arena == "device"),
    ):
        return asyncio.run(publish())


class _StockServer(FakeControl):
    """A server without the plugin: its ranks do what SGLang does for each request."""

    def __init__(self, url: str, tensor: int) -> None:
        super().__init__(url)
        self.programs: list[list[Action]] = [[] for _ in range(tensor)]
        self._groups: dict[str, list[FakeNCCL]] = {}

    async def answer(self, path: str, body: dict[str, Any]) -> None:
        for tp, program in enumerate(self.programs):
            with recording() as actions:
                self._act(tp, path, body)
            program.extend(actions)

    def _act(self, tp: int, path: str, body: dict[str, Any]) -> None:
        name = body.get("group_name", "")
        match path:
            case "/init_weights_update_group":
                member = body["rank_offset"] + tp
                group = FakeNCCL(FakeStore(name), member, body["world_size"], FakeNCCL.Options())
                self._groups.setdefault(name, []).append(group)
            case "/update_weights_from_distributed":
                sizes = (
                    prod(shape) * ITEM_BYTES[dtype] for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
                )
                message = torch.empty(sum(sizes), dtype=torch.uint8, device=GPU)
                self._groups[name][tp].broadcast([message], dist.BroadcastOptions()).wait()
                self.version = body.get("weight_version", self.version)


def record_broadcasts(case: Case, count: int = 2) -> Cluster:
    """As `record_publishes`, for the broadcast: real driver and senders, and servers that follow its requests."""
    layout = Layout(case.config, case.trainer)
    plan = plan_broadcast(layout, case.bucket_mb * 2**20, DTYPE)
    device = SimpleNamespace(torch_device=GPU, backend="nccl")
    senders = [BroadcastSender(plan, shards, device) for shards in _trainer(layout)]
    servers = [_StockServer(f"http://engine-{index}", case.tensor) for index in range(case.engines)]
    programs: list[list[Action]] = [[] for _ in senders]

    async def on_all(timeout: float, method: Callable[..., Any], *args: Any) -> list[Any]:
        answers = []
        for sender, program in zip(senders, programs, strict=True):
            with recording() as actions:
                answers.append(getattr(sender, method.__name__.removeprefix("sync_"))(*args))
            program.extend(actions)
        return answers

    async def publish() -> Cluster:
        ranks = SimpleNamespace(on_all=on_all)
        sync = BroadcastSync(servers, ranks, plan, case.tensor, SyncConfig(), TimeoutConfig(), device)
        everybody = [*programs, *(program for server in servers for program in server.programs)]
        for version in range(1, count + 1):
            _mark(everybody, f"publish {version}")
            await sync.publish(version)
        _mark(everybody, "end")
        return Cluster(case, programs, [server.programs for server in servers])

    with nccl():
        return asyncio.run(publish())


@dataclass(frozen=True)
class Figures:
    """What a machine measured; times in virtual seconds, the rest by GPU with the most of it."""

    connected: float
    publishes: tuple[float, ...]
    trainer_communicators: int
    engine_communicators: int
    engine_blocks: int
    sources: int
    balance: float


@dataclass(frozen=True)
class Budget:
    """The most that a sync may take."""

    sources: int = 16
    trainer_communicators: int = 8
    engine_blocks: int = 16
    balance: float = 1.1
    connected: float = 15.0

    def exceeded(self, figures: Figures) -> list[str]:
        """What is above the budget, with both numbers."""
        limits = vars(self).items()
        return [
            f"{name} {getattr(figures, name):g} > {limit:g}" for name, limit in limits if getattr(figures, name) > limit
        ]


def build(
    cluster: Cluster, costs: Costs | None = None, deadlines: bool = True
) -> tuple[Machine, list[Process], list[list[Process]]]:
    """A machine that will run the programs, its trainer's processes, and its engines'."""
    machine = Machine(costs, deadlines)
    trainer, engines = cluster.processes()
    for process, program in zip(trainer, cluster.trainer, strict=True):
        machine.add(process, program)
    for processes, programs in zip(engines, cluster.engines, strict=True):
        for process, program in zip(processes, programs, strict=True):
            machine.add(process, program)
    return machine, trainer, engines


def seconds_by_engine(machine: Machine, engines: Sequence[Sequence[Process]]) -> list[float]:
    """How long the last publish of a run took each engine."""
    times = {host.process: host.times for host in machine.hosts if host.times}
    start = list(times[engines[0][0]])[-3]
    return [max(times[rank]["before end"] - times[rank][start] for rank in engine) for engine in engines]


def figures(machine: Machine, trainer: Sequence[Process], engines: Sequence[Sequence[Process]]) -> Figures:
    """Raises AssertionError, which says who waited for whom, unless all went well."""
    problems = [*machine.faults, *(f"{who} at {at:.1f} s: {what}" for who, (at, what) in machine.failures.items())]
    if machine.stuck or problems:
        raise AssertionError("; ".join([machine.stuck, *problems[:5]]))
    times = machine.hosts[0].times
    marks = [*(time for name, time in times.items() if name.startswith("publish")), times["end"]]
    ranks = [rank for engine in engines for rank in engine]
    sent = [process.sent for process in trainer]
    return Figures(
        connected=machine.connected,
        publishes=tuple(after - before for before, after in pairwise(marks)),
        trainer_communicators=max(process.peak_communicators for process in trainer),
        engine_communicators=max(process.peak_communicators for process in ranks),
        engine_blocks=max(process.peak_blocks for process in ranks),
        sources=max(len(process.peers) for process in ranks),
        balance=max(sent) / (sum(sent) / len(sent)),
    )
