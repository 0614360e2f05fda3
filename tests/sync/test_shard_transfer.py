"""Senders and receivers over real gloo links, a thread each: what arrives, what deltas save, and what faults do."""

import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch
from msgspec import structs
from tiny_shards import random_weights
from waits import PATIENCE
from wires import KIND, Wires, check, handle

from megasync.base.store import join_store
from megasync.errors import SyncError
from megasync.layout.digest import MASK
from megasync.sync.groups import PeerGroup
from megasync.sync.messages import (
    CommitRequest,
    ReceivePlanRequest,
    ServerLinks,
)
from megasync.sync.shard import arena as shard_arena
from megasync.sync.shard import plan as shard_plan
from megasync.sync.shard import receiver as receiving
from megasync.sync.shard import sender as shard_sender
from megasync.sync.shard.feeds import WHOLE, Feed
from megasync.sync.shard.plan import ShardPlan, receive_plan
from megasync.sync.shard.receiver import Incoming
from megasync.sync.shard.sender import _Lane
from megasync.sync.shared_memory import HANDLES

# (bytes from which a message goes straight from its parameter, whether a commit exchanges memory)
WAYS = {
    "packed-copied": (10**9, False),
    "direct-copied": (1000, False),
    "packed-exchanged": (10**9, True),
    "direct-exchanged": (1000, True),
}
# For what depends on neither: one way of each.
some_ways = pytest.mark.parametrize("wires", ["packed-exchanged", "direct-copied"], indirect=True)


@pytest.fixture(params=WAYS)
def wires(request, monkeypatch):
    """Everything goes in packed buckets, or most of it straight from the parameters; commits copy or exchange."""
    limit, exchange = WAYS[request.param]
    monkeypatch.setattr(shard_plan, "DIRECT_BYTES", limit)
    made = []

    def make(**options) -> Wires:
        made.append(Wires(**{"exchange": exchange} | options))
        return made[-1]

    yield make
    assert all(any(bucket.direct for bucket in w.plan.buckets) == (limit == 1000) for w in made)
    for each in made:
        each.close()


# What the links go over, as both ends name it.
over = pytest.mark.parametrize("backend", ["gloo", HANDLES])


def weights(w: Wires, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.to(w.dtype) for name, tensor in random_weights(w.layout).items()}


def staged(w: Wires, attempt: str, whole: dict[str, torch.Tensor], base: str = "") -> tuple[list, list]:
    """What senders and receivers report of an attempt that all have staged, and that no engine serves yet."""
    w.weights(whole)
    sent, received = w.stage(attempt, base=base)
    assert [report.state for report in received] == ["staged", "staged"], received
    assert not w.serves(whole)
    return sent, received


def published(w: Wires, attempt: str, whole: dict[str, torch.Tensor], base: str = "") -> int:
    """The bytes that were sent until the engine serves these weights."""
    sent, _ = staged(w, attempt, whole, base)
    w.commit(attempt)
    assert w.serves(whole)
    return sum(report.bytes for report in sent)


@over
def test_versions_arrive_one_after_another_over_the_same_links(wires, backend):
    w = wires(backend=backend)
    for version in range(3):
        sent, received = staged(w, f"v{version}", weights(w, version))
        for tp, report in enumerate(received):
            digests = (value for result in sent for _, _, to, value in result.digests if to == tp)
            assert report.digest == sum(digests) & MASK
        assert sum(result.bytes for result in sent) == w.plan.nbytes
        for sender in w.senders:
            assert len(sender._buffers) <= 2
            assert all(buffer.memory.numel() <= w.plan.largest_packed for buffer in sender._buffers)
        w.commit(f"v{version}")
        assert w.serves(weights(w, version))


@pytest.mark.parametrize("turn", [0, 1])
def test_replicas_share_an_engine_and_others_send_nothing(wires, turn):
    w = wires(replicas=3, feed=Feed((0, 2), (4, WHOLE - 4), turn))
    for version in range(2):
        sent, _ = staged(w, f"v{version}", weights(w, version))
        w.commit(f"v{version}")
        assert w.serves(weights(w, version))
    # Ranks of the replicas 0, 1 and 2, two of each.
    first, none, last = (sum(report.bytes for report in sent[at : at + 2]) for at in (0, 2, 4))
    assert none == 0
    assert first + last == w.plan.nbytes
    assert 0.15 < first / w.plan.nbytes < 0.35


def test_an_arena_in_other_memory_is_filled_message_by_message(wires, monkeypatch):
    """As beside a GPU with ``sync.arena: host``."""
    monkeypatch.setattr(shard_arena, "_lands", lambda device, wire: False)
    w = wires()
    for version in range(2):
        published(w, f"v{version}", weights(w, version))


def test_pinned_memory_is_exactly_as_large_as_what_it_holds(wires, monkeypatch):
    """CUDA's calls are noted, not made; a real allocation would take the next power of two."""
    registered, calls = {}, SimpleNamespace()
    calls.cudaHostRegister = lambda address, nbytes, flags: registered.update({address: nbytes}) or 0
    calls.cudaHostUnregister = lambda address: registered.pop(address) and 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(shard_arena, "_pins", lambda device, wire: True)
    w = wires(exchange=False)
    sizes = [receive_plan(w.plan, tp, KIND, ()).nbytes for tp in range(2)]
    assert sorted(registered.values()) == sorted(sizes)
    plans = tuple(receive_plan(w.plan, tp, "other", ()) for tp in range(2))
    handle(w.receivers[0], "receive_plan", ReceivePlanRequest(plans, "host", None, False))
    assert sorted(registered.values()) == sorted(sizes)
    handle(w.receivers[0], "receive_plan", ReceivePlanRequest(plans, "host", 1, False))
    assert list(registered.values()) == [sizes[1]]


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
    staged(w, "a", weights(w, 0))
    assert waited
    assert set(waited) == {torch.device("cpu")}
    finished.clear()
    w.commit("a")
    assert finished == [torch.device("cpu")] * 2


def test_parameters_that_an_update_finds_otherwise_are_not_written(wires):
    w = wires()
    staged(w, "a", weights(w, 0))
    name = next(iter(w.receivers[0]._forms))
    packed = dict(w.engine[0].tensors())
    packed[name] = packed[name].reshape(1, -1)
    w.receivers[0]._params = lambda: packed
    with pytest.raises(SyncError, match=f"the engine keeps {re.escape(name)} as .* a kernel packed it"):
        check(w.receivers[0], "a")
    check(w.receivers[1], "a")


@pytest.mark.parametrize(("exchange", "deltas"), [(True, False), (True, True), (False, False)])
def test_a_commit_exchanges_memory_unless_the_engine_or_a_delta_needs_it_where_it_is(wires, exchange, deltas):
    w = wires(exchange=exchange, deltas=deltas)
    staged(w, "a", weights(w, 0))
    before = {name: tensor.data_ptr() for name, tensor in w.engine[0].tensors().items()}
    w.commit("a")
    moved = {tensor.data_ptr() != before[name] for name, tensor in w.engine[0].tensors().items()}
    assert moved == {exchange and not deltas}
    # It would bring back what was live before.
    with pytest.raises(SyncError, match=r"attempt 'a' is not staged here; 'a' is committed"):
        check(w.receivers[0], "a")


def test_a_driver_that_sends_deltas_gets_an_arena_that_keeps_versions(wires):
    """As when a server outlives a run without deltas."""
    w = wires(exchange=True)
    plans = tuple(receiver._plan for receiver in w.receivers)
    for receiver in w.receivers:
        handle(receiver, "receive_plan", ReceivePlanRequest(plans, "device", None, True))
    whole = weights(w, 0)
    published(w, "a", whole)
    published(w, "b", changed_in_one_percent(whole), base="a")


def test_links_that_are_not_used_again_are_closed(wires):
    w = wires()
    for name in ("first", "second"):
        w.links = name
        staged(w, name, weights(w, 0))
        assert [list(sender._links) for sender in w.senders] == [[name], [name]]


def changed_in_one_percent(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.where(torch.rand(t.shape) < 0.01, t + 1, t) for name, t in whole.items()}


def test_deltas_carry_little_and_give_the_same_bits(wires):
    w = wires(dtype=torch.bfloat16, deltas=True)
    whole = weights(w, 0)
    first = published(w, "a", whole)
    assert published(w, "b", changed_in_one_percent(whole), base="a") < 0.2 * first
    # Everything changes: no delta is smaller, and full buckets go through the same door.
    assert published(w, "c", weights(w, 7), base="b") == first


def test_a_version_for_other_engines_keeps_what_deltas_build_on(wires):
    w = wires(deltas=True)
    staged(w, "a", weights(w, 0))
    w.send(structs.replace(w.requests("elsewhere", "", 10.0)[0], servers=()))
    staged(w, "b", weights(w, 0), base="a")


def test_a_delta_needs_the_same_base_on_both_sides(wires):
    w = wires(deltas=True)
    staged(w, "a", weights(w, 0))
    _, to_receive = w.requests("b", "other", 10.0)
    with pytest.raises(SyncError, match=r"deltas build on attempt 'other', but the arena holds 'a'"):
        handle(w.receivers[0], "stage", to_receive)
    sent = w.send(w.requests("b", "other", 0.5)[0])
    assert all("deltas build on attempt 'other', which this rank has not kept" in str(error) for error in sent)


@over
def test_without_an_arena_the_commit_itself_receives(wires, backend):
    w = wires(arena_bytes=1000, backend=backend)
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
            commit.result(timeout=PATIENCE)
    assert w.serves(whole)


def at_the_third(monkeypatch, plan: ShardPlan, source: int, harm: Callable) -> None:
    """`harm` gets the payload of the third bucket of a sender as it is about to leave, and returns what leaves."""
    start, third = _Lane._start, [tag for tag, _ in plan.of_source(source)][2]

    def harmed(lane, parcel, to, parts):
        if parcel and parcel.tag == third:
            *ahead, (number, payload) = parts
            parts = [*ahead, (number, harm(payload))]
        start(lane, parcel, to, parts)

    monkeypatch.setattr(_Lane, "_start", harmed)


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


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (flip_a_bit, "arrived with digest"),
        (die_in_the_middle, "bucket"),
        (stall_in_the_middle, "Timed out|timed out|closed"),
    ],
)
@over
@some_ways
def test_after_a_fault_the_old_version_serves_and_the_next_sync_succeeds(
    wires, monkeypatch, fault: Callable, words, backend
):
    w = wires(backend=backend)
    old = weights(w, 0)
    published(w, "a", old)
    with monkeypatch.context() as patch:
        at_the_third(patch, w.plan, 1, fault)
        w.weights(weights(w, 1))
        # Only what arrives is judged by what it is.
        _, received = w.stage("b", stall=30.0 if fault is flip_a_bit else 1.0)
    failed = [report for report in received if report.state == "failed"]
    assert failed, received
    assert any(re.search(words, report.error) for report in failed), failed
    for receiver, report in zip(w.receivers, received, strict=True):
        if report.state == "failed":
            with pytest.raises(SyncError, match=r"attempt 'b' is not staged here; 'b' is failed"):
                check(receiver, "b")
    assert w.serves(old)
    w.mend()
    published(w, "c", weights(w, 2))


@pytest.mark.every(3)
@some_ways
@pytest.mark.parametrize("comes", [False, True], ids=["never joins", "joins and never receives"])
def test_an_engine_that_receives_nothing_costs_no_other_engine_anything(wires, comes):
    w = wires()
    stuck = ServerLinks("stuck", KIND, "http://stuck", (0,))
    w.weights(weights(w, 0))
    to_send, to_receive = w.requests("a", "", 10.0)
    both = structs.replace(
        to_send, servers=(stuck, *to_send.servers), links=("stuck", "first"), stall=2.0, join=10.0 if comes else 2.0
    )
    to_receive = structs.replace(to_receive, patience=5.0)

    def join(rank: int) -> PeerGroup:
        store = join_store(*w.meeting_point, 10)
        return PeerGroup(store, "stuck", rank, 4, "gloo", "127.0.0.1", 10, torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(join, rank) for rank in (2, 3) if comes]
        for receiver in w.receivers:
            handle(receiver, "stage", to_receive)
        sent = w.send(both)
        _held = [each.result() for each in joining]
    assert [w.end_of_stage(receiver).state for receiver in w.receivers] == ["staged", "staged"]
    for report in sent:
        assert list(report.failed) == ["http://stuck"]
        assert re.search("bucket|table" if comes else "no links to http://stuck", report.failed["http://stuck"])
        assert {rank.url for rank in report.confirmed} <= {"http://engine"}
    # Its links are gone, and those of the other engine serve the next version.
    assert [list(sender._links) for sender in w.senders] == [["first"], ["first"]]
    kept = [sender._links["first"] for sender in w.senders]
    published(w, "b", weights(w, 1))
    assert [sender._links["first"] for sender in w.senders] == kept


@some_ways
def test_a_receiver_that_does_not_come_fails_the_sender_in_time(wires):
    w = wires()
    w.weights(weights(w, 0))
    to_send, _ = w.requests("a", "", 1.0)
    sent = w.send(structs.replace(to_send, timeout=2.0))
    assert all("no links to http://engine" in result.failed["http://engine"] for result in sent)


@some_ways
def test_nothing_is_committed_that_is_not_staged(wires):
    w = wires()
    with pytest.raises(SyncError, match=r"attempt 'x' is not staged here; nothing is"):
        check(w.receivers[0], "x")
    with pytest.raises(SyncError, match="no receive plan, or a different one"):
        check(w.receivers[0], "x", "other")
    with pytest.raises(SyncError, match="unknown command 'fly'"):
        w.receivers[0].handle("fly", {})


@some_ways
def test_the_plan_of_one_kind_is_made_once(wires, monkeypatch):
    w = wires()
    monkeypatch.setattr(shard_sender, "plan_shards", None)
    assert w.senders[0].prepare(KIND, [], (1,), [0]) == w.plan.digest


@some_ways
def test_a_request_with_an_unknown_or_missing_field_is_refused_with_its_name(wires):
    w = wires()
    _, to_receive = w.requests("a", "", 1.0)
    given = msgspec.to_builtins(to_receive)
    with pytest.raises(SyncError, match="not a ReceiveRequest: .*unknown field `sources`.*same version of megasync"):
        w.receivers[0].handle("stage", given | {"sources": [0]})
    del given["rendezvous"]["port"]
    with pytest.raises(SyncError, match=r"missing required field `port` - at `\$.rendezvous`"):
        w.receivers[0].handle("stage", given)
    with pytest.raises(SyncError, match="not a CommitRequest: .*missing required field `plan`"):
        w.receivers[0].check({"attempt": "a"})


@pytest.mark.parametrize("seed", range(20))
def test_messages_in_a_ring_never_overlap_and_an_empty_ring_takes_any(seed):
    chance = random.Random(seed)
    largest = 8 * chance.randint(1, 40)
    ring, held = receiving._Ring(largest, torch.device("cpu")), deque()
    for number in range(300):
        if chance.random() < 0.6:
            place = ring.take(8 * chance.randint(1, largest // 8))
            if place is None:
                assert held
            else:
                held.append((place.fill_(number % 251), number % 251))
        elif held:
            held.popleft()
            ring.free()
        assert all(bool((place == value).all()) for place, value in held)
