"""Senders and receivers over real gloo links, a thread each: what arrives, what deltas save, and what faults do."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
from fake_engine import fake_engine, traced
from msgspec import structs
from tiny_shards import random_weights, shards_of

from megasync.device import Device
from megasync.errors import SyncError
from megasync.layout.digest import combine
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.messages import (
    CommitRequest,
    Empty,
    EngineLinks,
    ReceivePlanRequest,
    ReceiveRequest,
    Rendezvous,
    SendReport,
    SendRequest,
    StageReport,
    SyncMessage,
)
from megasync.sync.shard import plan as shard_plan
from megasync.sync.shard import receiver as receiving
from megasync.sync.shard import sender as shard_sender
from megasync.sync.shard.plan import ShardPlan, plan_shards, receive_plan
from megasync.sync.shard.receiver import Incoming, ShardReceiver
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


def handle(receiver: ShardReceiver, command: str, request: SyncMessage) -> Any:
    """As over the wire."""
    return receiver.handle(command, json.loads(json.dumps(msgspec.to_builtins(request))))


def check(receiver: ShardReceiver, attempt: str, kind: str = KIND) -> None:
    receiver.check({"attempt": attempt, "kind": kind})


class Wires:
    """Two trainer ranks (TP2) and the two ranks of one engine, all in this process."""

    def __init__(self, dtype: torch.dtype = torch.float32, arena_bytes: int | None = None) -> None:
        self.dtype = dtype
        name = str(dtype).removeprefix("torch.")
        self.layout = Layout(CONFIG, Topology(tensor=2))
        self.engine = fake_engine(CONFIG, 2, dtype)
        ranks = traced(self.engine, self.layout)
        self.plan = plan_shards(self.layout, ranks, BUCKET_BYTES, name)
        self.params = [{n: torch.empty(s, dtype=dtype) for n, s in self.layout.params(r).items()} for r in range(2)]
        device = Device("cpu")
        self.senders = [
            ShardSender(Shards(self.layout, name, rank, self.params[rank]), BUCKET_BYTES, device, "127.0.0.1")
            for rank in range(2)
        ]
        self.receivers = [ShardReceiver(rank.tp, rank.tensors) for rank in self.engine]
        for sender in self.senders:
            assert sender.prepare(KIND, ranks) == self.plan.digest
        plans = tuple(receive_plan(self.plan, tp, KIND, rank.fills) for tp, rank in enumerate(ranks))
        request = ReceivePlanRequest(plans, "device", arena_bytes)
        # An engine may be in inference mode then.
        with torch.inference_mode():
            self.stages = [handle(receiver, "receive_plan", request).stages for receiver in self.receivers]
        self.links = "first"
        self.listen()

    def listen(self) -> None:
        self.meeting_point, _ = (sender.listen(10) for sender in self.senders)

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
            engines=(EngineLinks(self.links, KIND, "http://engine"),),
            links=(self.links,),
            join={KIND: 10.0},
            bases={KIND: base} if base else {},
            stream=stream,
            keep=True,
        )
        host, port = self.meeting_point
        rendezvous = Rendezvous(self.links, host, port, "127.0.0.1", self.plan.sources, 2, "gloo", 10.0)
        return to_send, ReceiveRequest(attempt, KIND, rendezvous, base, stream or bool(base), 10.0, stall)

    def stage(self, attempt: str, base: str = "", stall: float = 10.0) -> tuple[list, list]:
        """(what each sender returned or raised, what each receiver reports at the end)."""
        to_send, to_receive = self.requests(attempt, base, stall)
        for receiver in self.receivers:
            handle(receiver, "stage", to_receive)
        sent = self.send(to_send)
        return sent, [self.end_of_stage(receiver) for receiver in self.receivers]

    def send(self, request: SendRequest) -> list[SendReport | BaseException]:
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(sender.send, request) for sender in self.senders]
            return [future.exception() or future.result() for future in futures]

    def end_of_stage(self, receiver: ShardReceiver) -> StageReport:
        end = time.monotonic() + 30
        while (report := handle(receiver, "poll", Empty())).state == "running":
            assert time.monotonic() < end
            time.sleep(0.01)
        return report

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


@pytest.fixture(params=[10**9, 1000], ids=["packed", "direct"])
def wires(request, monkeypatch):
    """Everything goes in packed buckets, or most of it straight from the parameters."""
    monkeypatch.setattr(shard_plan, "DIRECT_BYTES", request.param)
    made = []

    def make(**options) -> Wires:
        made.append(Wires(**options))
        return made[-1]

    yield make
    assert all(any(bucket.direct for bucket in w.plan.buckets) == (request.param == 1000) for w in made)
    for each in made:
        each.close()


def weights(found: Wires, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.to(found.dtype) for name, tensor in random_weights(found.layout).items()}


def test_versions_arrive_one_after_another_over_the_same_links(wires):
    w = wires()
    for version in range(3):
        whole = weights(w, version)
        w.weights(whole)
        sent, received = w.stage(f"v{version}")
        assert [report.state for report in received] == ["staged", "staged"], received
        assert not w.serves(whole)
        for tp, report in enumerate(received):
            parts = {tag: value for result in sent for _, to, tag, value in result.digests if to == tp}
            assert report.digest == combine(parts)
        assert sum(result.bytes for result in sent) == w.plan.nbytes
        assert all(buffer.numel() <= w.plan.largest_packed for sender in w.senders for buffer in sender._buffers)
        w.commit(f"v{version}")
        assert w.serves(whole)


def test_an_arena_in_other_memory_is_filled_message_by_message(wires, monkeypatch):
    """As beside a GPU with ``sync.arena: host``."""
    monkeypatch.setattr(ShardReceiver, "_lands_in", lambda receiver, arena: False)
    w = wires()
    for version in range(2):
        whole = weights(w, version)
        w.weights(whole)
        _, received = w.stage(f"v{version}")
        assert [report.state for report in received] == ["staged", "staged"], received
        w.commit(f"v{version}")
        assert w.serves(whole)


def test_waits_for_messages_hold_up_no_other_stream_and_a_commit_is_over_when_it_returns(wires, monkeypatch):
    inside, waited, finished = threading.local(), [], []

    @contextmanager
    def fake_stream(device: torch.device) -> Iterator[None]:
        inside.stream = device
        yield
        inside.stream = None

    def wait(*args) -> None:
        waited.append(getattr(inside, "stream", None))
        arrived(*args)

    arrived = Incoming.wait
    monkeypatch.setattr(receiving, "side_stream", fake_stream)
    monkeypatch.setattr(Incoming, "wait", wait)
    w = wires()
    monkeypatch.setattr(receiving, "synchronize", finished.append)
    whole = weights(w, 0)
    w.weights(whole)
    w.stage("a")
    assert waited
    assert set(waited) == {torch.device("cpu")}
    assert not finished
    w.commit("a")
    assert finished == [torch.device("cpu")] * 2
    assert w.serves(whole)


def test_parameters_that_an_update_finds_otherwise_are_not_written(wires):
    w = wires()
    w.weights(weights(w, 0))
    w.stage("a")
    name = next(iter(w.receivers[0]._forms))
    packed = dict(w.engine[0].tensors())
    packed[name] = packed[name].reshape(1, -1)
    w.receivers[0]._params = lambda: packed
    with pytest.raises(SyncError, match=f"the engine keeps {re.escape(name)} as .* a kernel packed it"):
        check(w.receivers[0], "a")
    check(w.receivers[1], "a")


def test_links_that_are_not_used_again_are_closed(wires):
    w = wires()
    w.weights(weights(w, 0))
    for name in ("first", "second"):
        w.links = name
        _, received = w.stage(name)
        assert [report.state for report in received] == ["staged", "staged"], received
        assert [list(sender._links) for sender in w.senders] == [[name], [name]]


def changed_in_one_percent(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.where(torch.rand(t.shape) < 0.01, t + 1, t) for name, t in whole.items()}


def test_deltas_carry_little_and_give_the_same_bits(wires):
    w = wires(dtype=torch.bfloat16)
    whole = weights(w, 0)
    w.weights(whole)
    first, _ = w.stage("a")
    w.commit("a")
    whole = changed_in_one_percent(whole)
    w.weights(whole)
    second, received = w.stage("b", base="a")
    assert [report.state for report in received] == ["staged", "staged"], received
    w.commit("b")
    assert w.serves(whole)
    assert sum(r.bytes for r in second) < 0.2 * sum(r.bytes for r in first)
    # Everything changes: no delta is smaller, and full buckets go through the same door.
    whole = weights(w, 7)
    w.weights(whole)
    third, received = w.stage("c", base="b")
    assert [report.state for report in received] == ["staged", "staged"], received
    w.commit("c")
    assert w.serves(whole)
    assert sum(r.bytes for r in third) == sum(r.bytes for r in first)


def test_a_delta_needs_the_same_base_on_both_sides(wires):
    w = wires()
    w.weights(weights(w, 0))
    w.stage("a")
    _, to_receive = w.requests("b", "other", 10.0)
    with pytest.raises(SyncError, match=r"deltas build on attempt 'other', but the arena holds 'a'"):
        handle(w.receivers[0], "stage", to_receive)
    sent = w.send(w.requests("b", "other", 0.5)[0])
    assert all("deltas build on attempt 'other', which this rank has not kept" in str(error) for error in sent)


def test_without_an_arena_the_commit_itself_receives(wires):
    w = wires(arena_bytes=1000)
    assert w.stages == [False, False]
    whole = weights(w, 1)
    w.weights(whole)
    to_send, to_receive = w.requests("s", "", 10.0, stream=True)
    with pytest.raises(SyncError, match="no arena"):
        handle(w.receivers[0], "stage", to_receive)
    with ThreadPoolExecutor(2) as pool:
        commits = [pool.submit(receiver.commit, CommitRequest("s", KIND, to_receive)) for receiver in w.receivers]
        w.send(to_send)
        for commit in commits:
            commit.result(timeout=30)
    assert w.serves(whole)


def at_the_third(monkeypatch, plan: ShardPlan, source: int, harm: Callable) -> None:
    """`harm` gets the payload of the third bucket of a sender as it is about to leave, and returns what leaves."""
    start, third = shard_sender._start, [tag for tag, _ in plan.of_source(source)][2]

    def harmed(links, to, parts, tag, buffer):
        if tag == third:
            *ahead, (number, payload) = parts
            parts = [*ahead, (number, harm(payload))]
        return start(links, to, parts, tag, buffer)

    monkeypatch.setattr(shard_sender, "_start", harmed)


def flip_a_bit(payload: torch.Tensor) -> torch.Tensor:
    changed = payload.clone()
    changed[5] ^= 4
    return changed


def die_in_the_middle(payload: torch.Tensor) -> torch.Tensor:
    """The other sender goes on."""
    raise RuntimeError("this rank is gone")


def stall_in_the_middle(payload: torch.Tensor) -> torch.Tensor:
    """Past the limit of a message."""
    time.sleep(2.5)
    return payload


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (flip_a_bit, "arrived with digest"),
        (die_in_the_middle, "bucket"),
        (stall_in_the_middle, "Timed out|timed out|closed"),
    ],
)
def test_after_a_fault_the_old_version_serves_and_the_next_sync_succeeds(wires, monkeypatch, fault: Callable, words):
    w = wires()
    old = weights(w, 0)
    w.weights(old)
    w.stage("a")
    w.commit("a")
    with monkeypatch.context() as patch:
        at_the_third(patch, w.plan, 1, fault)
        w.weights(weights(w, 1))
        _, received = w.stage("b", stall=1.0)
    failed = [report for report in received if report.state == "failed"]
    assert failed, received
    assert any(re.search(words, report.error) for report in failed), failed
    for receiver, report in zip(w.receivers, received, strict=True):
        if report.state == "failed":
            with pytest.raises(SyncError, match=r"attempt 'b' is not staged here; 'b' is failed"):
                check(receiver, "b")
    assert w.serves(old)
    w.mend()
    new = weights(w, 2)
    w.weights(new)
    _, received = w.stage("c")
    assert [report.state for report in received] == ["staged", "staged"], received
    w.commit("c")
    assert w.serves(new)


def test_a_receiver_that_does_not_come_fails_the_sender_in_time(wires):
    w = wires()
    w.weights(weights(w, 0))
    to_send, _ = w.requests("a", "", 1.0)
    start = time.monotonic()
    sent = w.send(structs.replace(to_send, timeout=2.0))
    assert all(isinstance(result, SyncError) for result in sent)
    assert time.monotonic() - start < 8


def test_nothing_is_committed_that_is_not_staged(wires):
    w = wires()
    with pytest.raises(SyncError, match=r"attempt 'x' is not staged here; nothing is"):
        check(w.receivers[0], "x")
    with pytest.raises(SyncError, match="no receive plan, or a different one"):
        check(w.receivers[0], "x", "other")
    with pytest.raises(SyncError, match="unknown command 'fly'"):
        w.receivers[0].handle("fly", {})


def test_the_plan_of_one_kind_is_made_once(wires, monkeypatch):
    w = wires()
    monkeypatch.setattr(shard_sender, "plan_shards", None)
    assert w.senders[0].prepare(KIND, []) == w.plan.digest


def test_a_request_with_an_unknown_or_missing_field_is_refused_with_its_name(wires):
    w = wires()
    _, to_receive = w.requests("a", "", 1.0)
    given = msgspec.to_builtins(to_receive)
    with pytest.raises(SyncError, match="not a ReceiveRequest: .*unknown field `sources`.*same version of megasync"):
        w.receivers[0].handle("stage", given | {"sources": [0]})
    del given["rendezvous"]["port"]
    with pytest.raises(SyncError, match=r"missing required field `port` - at `\$.rendezvous`"):
        w.receivers[0].handle("stage", given)
    with pytest.raises(SyncError, match="not a CommitRequest: .*missing required field `kind`"):
        w.receivers[0].check({"attempt": "a"})
