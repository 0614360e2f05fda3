"""Trainer ranks and the two ranks of an engine in this process, with real senders and receivers."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from fake_engine import fake_engine, traced
from tiny_shards import shards_of
from waits import wait_until

from megasync.device import Device
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.messages import (
    CommitRequest,
    Empty,
    ReceivePlanRequest,
    ReceiveRequest,
    Rendezvous,
    SendReport,
    SendRequest,
    ServerLinks,
    StageReport,
    SyncMessage,
)
from megasync.sync.shard.feeds import WHOLE, Feed
from megasync.sync.shard.plan import plan_shards, receive_plan
from megasync.sync.shard.receiver import ShardReceiver
from megasync.sync.shard.sender import ShardSender
from megasync.sync.stream import Shards

CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 101,
    "num_hidden_layers": 2,
}
BUCKET_BYTES = 4000
KIND = "k"
CPU = Device("cpu")
ONE = Feed((0,), (WHOLE,), 0)


def handle(receiver: ShardReceiver, command: str, request: SyncMessage) -> Any:
    """As over the wire."""
    return receiver.handle(command, json.loads(json.dumps(msgspec.to_builtins(request))))


def check(receiver: ShardReceiver, attempt: str, plan: str = KIND) -> None:
    receiver.check({"attempt": attempt, "plan": plan})


class Wires:
    """Trainer ranks (TP2, of ``replicas`` replicas) and the two ranks of one engine that ``feed`` feeds."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        arena_bytes: int | None = None,
        device: Device = CPU,
        arena: str = "device",
        place: Callable[[torch.Tensor], object] = lambda tensor: None,
        replicas: int = 1,
        feed: Feed = ONE,
        backend: str = "",
        exchange: bool = False,
        deltas: bool = False,
    ) -> None:
        """``place`` is called with every parameter of trainer and engine, to put it on the ``device``.

        ``backend`` is that of the links, by default the device's.
        """
        self.dtype, self.backend = dtype, backend or device.backend
        name = str(dtype).removeprefix("torch.")
        self.layout, self.feed = Layout(CONFIG, Topology(tensor=2, data=replicas)), feed
        world = range(self.layout.topology.world)
        self.engine = fake_engine(CONFIG, 2, dtype)
        ranks = traced(self.engine, self.layout)
        self.plan = plan_shards(self.layout.with_replicas(len(feed.shares)), ranks, BUCKET_BYTES, name, feed.shares)
        self.params = [{n: torch.empty(s, dtype=dtype) for n, s in self.layout.params(r).items()} for r in world]
        for tensors in (*self.params, *(rank.tensors() for rank in self.engine)):
            for tensor in tensors.values():
                place(tensor)
        self.senders = [
            ShardSender(Shards(self.layout, name, rank, self.params[rank]), BUCKET_BYTES, device, "127.0.0.1", backend)
            for rank in world
        ]
        self.receivers = [ShardReceiver(rank.tp, rank.tensors, exchange) for rank in self.engine]
        derived = {sender.prepare(KIND, ranks, feed.shares, feed.replicas) for sender in self.senders}
        assert derived - {""} == {self.plan.digest}
        plans = tuple(
            receive_plan(self.plan, tp, KIND, rank.fills, feed.turn, self.world_rank) for tp, rank in enumerate(ranks)
        )
        request = ReceivePlanRequest(plans, arena, arena_bytes, deltas)
        # An engine may be in inference mode then.
        with torch.inference_mode():
            self.stages = [handle(receiver, "receive_plan", request).stages for receiver in self.receivers]
        self.links = "first"
        self.listen()

    def world_rank(self, local: int) -> int:
        return self.layout.topology.rank_of(self.feed.replicas, local)

    def listen(self) -> None:
        self.meeting_point, *_ = [sender.listen(10) for sender in self.senders]

    def weights(self, whole: dict[str, torch.Tensor]) -> None:
        """Gives the trainer these weights."""
        for rank, params in enumerate(self.params):
            for name, shard in shards_of(self.layout, rank, whole).items():
                params[name].copy_(shard.nan_to_num())

    def requests(
        self, attempt: str, base: str, stall: float, stream: bool = False
    ) -> tuple[SendRequest, ReceiveRequest]:
        to_send = SendRequest(
            attempt=attempt,
            timeout=10.0,
            stall=stall,
            meeting_point=self.meeting_point,
            servers=(ServerLinks(self.links, KIND, "http://engine", self.feed.replicas),),
            links=(self.links,),
            join=10.0,
            bases={KIND: base} if base else {},
            stream=stream,
            keep=True,
        )
        host, port = self.meeting_point
        sources = tuple(self.world_rank(source) for source in self.plan.sources)
        rendezvous = Rendezvous(self.links, host, port, "127.0.0.1", sources, 2, self.backend, 10.0)
        return to_send, ReceiveRequest(attempt, KIND, rendezvous, base, stream or bool(base), 10.0, stall, 0.0)

    def stage(self, attempt: str, base: str = "", stall: float = 10.0) -> tuple[list, list]:
        """(what each sender returned or raised, what each receiver reports at the end)."""
        to_send, to_receive = self.requests(attempt, base, stall)
        for receiver in self.receivers:
            handle(receiver, "stage", to_receive)
        sent = self.send(to_send)
        return sent, [self.end_of_stage(receiver) for receiver in self.receivers]

    def send(self, request: SendRequest) -> list[SendReport | BaseException]:
        with ThreadPoolExecutor(len(self.senders)) as pool:
            futures = [pool.submit(sender.send, request) for sender in self.senders]
            return [future.exception() or future.result() for future in futures]

    def end_of_stage(self, receiver: ShardReceiver) -> StageReport:
        def ended() -> StageReport | None:
            report = handle(receiver, "poll", Empty())
            return None if report.state == "running" else report

        return wait_until(ended)

    def commit(self, attempt: str) -> None:
        for receiver in self.receivers:
            check(receiver, attempt)
        for receiver in self.receivers:
            receiver.commit(CommitRequest(attempt, KIND))

    def serves(self, whole: dict[str, torch.Tensor]) -> bool:
        """Whether the engine holds exactly what loading these tensors would give."""
        oracle = fake_engine(CONFIG, 2, self.dtype)
        for rank in oracle:
            rank.load_weights(whole.items())
        return all(
            torch.equal(found.tensors()[name], expected)
            for found, rank in zip(self.engine, oracle, strict=True)
            for name, expected in rank.tensors().items()
        )

    def mend(self) -> None:
        """New links, as the driver makes them after a failure."""
        for receiver in self.receivers:
            handle(receiver, "drop", Empty())
        for sender in self.senders:
            sender.leave()
        self.links += "+"
        self.listen()

    def close(self) -> None:
        for receiver in self.receivers:
            handle(receiver, "drop", Empty())
        for sender in self.senders:
            sender.leave()
