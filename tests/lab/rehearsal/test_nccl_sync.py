"""Publishes over the fake NCCL: real driver, senders and receivers; and faults that it must find."""

import re
from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from fake_nccl_group import FakeNCCL
from nccl_cluster import (
    QWEN3_32B,
    Budget,
    Case,
    build,
    figures,
    record_broadcasts,
    record_publishes,
    seconds_by_engine,
)

from megasync.config.schema import TimeoutConfig
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.groups import PeerGroup
from megasync.sync.shard import sync as shard_sync

# The shipped configuration of four nodes, with a smaller model.
SHIPPED = Case(QWEN3_32B, Topology(8, 2, 1), 2, 8, bucket_mb=1024).layers(2)

BUDGET = Budget()


@pytest.fixture(scope="module")
def shipped():
    return record_publishes(SHIPPED)


def seconds_with(shipped, slow: int | None) -> list[float]:
    machine, trainer, engines = build(shipped)
    if slow is not None:
        for rank in engines[slow]:
            rank.card = machine.costs.card / 10
    machine.run()
    figures(machine, trainer, engines)
    return seconds_by_engine(machine, engines)


def test_the_shipped_configuration_stays_within_the_budget(shipped):
    machine, trainer, engines = build(shipped)
    machine.run()
    totals = figures(machine, trainer, engines)
    assert BUDGET.exceeded(totals) == []
    # The second publish finds everything connected.
    assert totals.publishes[1] < 1.0 < totals.publishes[0]
    # Each engine receives the whole model each time.
    elements = sum(prod(shape) for shape in Layout(SHIPPED.config, SHIPPED.trainer).hf_tensors.values())
    for engine in engines:
        assert sum(rank.received for rank in engine) == pytest.approx(2 * 2 * elements, rel=0.001)


def test_one_slow_engine_delays_no_other(shipped):
    alike, slowed = seconds_with(shipped, None), seconds_with(shipped, 3)
    assert slowed.pop(3) > 3 * alike.pop(3)
    assert max(slowed) < 1.2 * max(alike)


def test_a_sender_that_starts_messages_ahead_deadlocks_through_its_hardware_queue(monkeypatch):
    """With several queues it would pass, and Megatron needs a single one."""
    init = PeerGroup.__init__

    def ahead(links, *args, **options):
        init(links, *args, **options)
        links.one_at_a_time = False

    monkeypatch.setattr(PeerGroup, "__init__", ahead)
    cluster = record_publishes(SHIPPED, 1)
    for queues in (1, 8):
        cluster.queues = queues
        machine, _, _ = build(cluster)
        machine.run()
        assert machine.stuck.startswith("deadlock: trainer rank 0 waits for a send") == (queues == 1)


def test_communicators_of_two_ranks_exceed_the_budget(monkeypatch):
    """What torch does without the call that makes one communicator for all."""
    monkeypatch.setattr(FakeNCCL, "eager_connect_single_device", lambda group, device: None)
    machine, trainer, engines = build(record_publishes(SHIPPED, 1), deadlines=False)
    machine.run()
    excess = BUDGET.exceeded(figures(machine, trainer, engines))
    assert {"trainer_communicators", "connected"} <= {text.split()[0] for text in excess}


def test_a_receive_that_is_posted_too_late_is_found(shipped):
    engines = [list(programs) for programs in shipped.engines]
    *before, (fork, number, staging), rest = next(
        [*program[:at], action, program[at + 1 :]]
        for program in [shipped.engines[2][0]]
        for at, action in enumerate(program)
        if action[0] == "fork"
    )
    middle = len(staging) // 2
    late = [*staging[:middle], ("work", 2 * TimeoutConfig().sync_stall), *staging[middle:]]
    engines[2][0] = [*before, (fork, number, late), *rest]
    machine, trainer, ranks = build(replace(shipped, engines=engines))
    machine.run()
    with pytest.raises(AssertionError, match=r"no time left: trainer rank \d+ waits for a send to rank 0 of engine 2"):
        figures(machine, trainer, ranks)


def test_a_receiver_that_takes_messages_in_another_order_is_found(monkeypatch):
    receive_plan = shard_sync.receive_plan

    def swapped(*args):
        plan = receive_plan(*args)
        buckets = list(plan.buckets)
        source, _ = Counter(bucket.source for bucket in buckets).most_common(1)[0]
        first, second = [at for at, bucket in enumerate(buckets) if bucket.source == source][:2]
        buckets[first], buckets[second] = buckets[second], buckets[first]
        return type(plan)(plan.name, tuple(buckets), plan.fills)

    monkeypatch.setattr(shard_sync, "receive_plan", swapped)
    machine, trainer, engines = build(record_publishes(replace(SHIPPED, engines=1), 1))
    machine.run()
    with pytest.raises(AssertionError, match="out of order: rank . of engine 0 has a receive from trainer rank"):
        figures(machine, trainer, engines)


def test_a_peer_that_dies_in_the_middle_is_found(shipped):
    machine, trainer, engines = build(shipped)
    machine.run()
    times = machine.hosts[0].times
    for moment in (times["publish 2"] / 2, (times["publish 2"] + times["end"]) / 2):
        machine, trainer, engines = build(shipped)
        machine.kill_at(moment, engines[3][1])
        machine.run()
        with pytest.raises(AssertionError, match="rank 1 of engine 3 is dead"):
            figures(machine, trainer, engines)


@pytest.fixture(scope="module")
def broadcast():
    return record_broadcasts(SHIPPED)


def test_a_broadcast_reaches_every_rank_of_every_engine(broadcast):
    machine, trainer, engines = build(broadcast)
    machine.run()
    totals = figures(machine, trainer, engines)
    # A group for each of the two stages. A sender also has one with each of its seven tensor-parallel peers.
    assert (totals.engine_communicators, totals.trainer_communicators) == (2, 8)
    assert totals.publishes[1] < 1.0 < totals.publishes[0]
    elements = sum(prod(shape) for shape in Layout(SHIPPED.config, SHIPPED.trainer).hf_tensors.values())
    for rank in (rank for engine in engines for rank in engine):
        assert rank.received == 2 * 2 * elements


def test_a_lost_sender_of_a_broadcast_ends_stock_servers(broadcast):
    machine, trainer, engines = build(broadcast)
    machine.run()
    times = machine.hosts[0].times
    machine, trainer, engines = build(broadcast)
    machine.kill_at((times["publish 2"] + times["end"]) / 2, trainer[0])
    machine.run()
    assert "trainer rank 0 is dead" in machine.stuck
    for rank in (rank for engine in engines for rank in engine):
        # The wait of the rank itself may end at the same moment as the watchdog's.
        ended = (
            r"(ended by torch's watchdog:|no time left: rank \d+ of engine \d+ waits for) a broadcast with root trainer"
        )
        assert re.match(ended, machine.failures[rank.name][1])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "case",
    [Case(QWEN3_32B, Topology(8, 2, 16), 8, 32), Case(QWEN3_32B, Topology(8, 2, 32), 2, 256)],
    ids=["256 x 32 x TP8", "512 x 256 x TP2"],
)
def test_large_clusters_stay_within_the_budget(case):
    machine, trainer, engines = build(record_publishes(case.layers(8)))
    machine.run()
    assert BUDGET.exceeded(figures(machine, trainer, engines)) == []
