"""Which replicas feed which engine: balanced, with few links, and steady while engines come and go."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.layout.topology import Topology
from megasync.sync.shard.feeds import WHOLE, Feed, assign_feeds


def loads(feeds: list[Feed], replicas: int) -> list[int]:
    sent = Counter()
    for feed in feeds:
        sent.update(dict(zip(feed.replicas, feed.shares, strict=True)))
    return [sent[replica] for replica in range(replicas)]


def links(feeds: list[Feed]) -> int:
    return max(Counter(replica for feed in feeds for replica in feed.replicas).values())


@pytest.mark.parametrize(
    ("engines", "replicas", "most", "most_links"),
    [(256, 32, 1, 8), (256, 32, 4, 8), (250, 32, 1, 8), (32, 8, 4, 4), (40, 32, 2, 3), (3, 4, 2, 2), (8, 1, 1, 8)],
)
def test_replicas_send_equally_much_over_few_links(engines, replicas, most, most_links):
    feeds = assign_feeds([], engines, replicas, most)
    sent = loads(feeds, replicas)
    assert max(sent) <= 1.1 * sum(sent) / replicas
    assert links(feeds) <= most_links


@pytest.mark.parametrize(("most", "busy"), [(1, 8), (2, 16), (8, 32)])
def test_fewer_engines_than_replicas_are_shared_as_far_as_they_may_be(most, busy):
    sent = [load for load in loads(assign_feeds([], 8, 32, most), 32) if load]
    assert sent == [8 * WHOLE // busy] * busy


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 4), st.randoms())
def test_engines_that_come_and_go_move_no_other(arrivals, replicas, most, random):
    most = min(most, replicas)
    present: list[Feed] = []
    for engines in arrivals:
        added = assign_feeds(present, engines, replicas, most)
        assert len(added) == engines
        for feed in added:
            assert sum(feed.shares) == WHOLE and min(feed.shares) > 0
            assert len(feed.replicas) <= most and feed.replicas == tuple(sorted(set(feed.replicas)))
        present += added
        present = random.sample(present, random.randint(0, len(present)))


def test_engines_of_the_same_replica_take_turns():
    feeds = assign_feeds([], 6, 2, 1)
    assert sorted((feed.replicas, feed.turn) for feed in feeds) == [((r,), turn) for r in (0, 1) for turn in range(3)]


@pytest.mark.parametrize(
    "topology", [Topology(2, 2, 6), Topology(4, 1, 8, expert=8, expert_tensor=1), Topology(2, 2, 12, expert=3)]
)
def test_every_rank_is_one_rank_of_the_replicas_that_it_is_in(topology):
    chosen = range(topology.replicas)[::-2][::-1]
    small = topology.with_replicas(len(chosen))
    ranks = [topology.rank_of(chosen, local) for local in range(small.world)]
    assert ranks == sorted(ranks) == [r for r in range(topology.world) if topology.replica_of(r) in chosen]
    for local, rank in enumerate(ranks):
        assert topology.local_rank(chosen, rank) == local
        assert topology.coords(rank)[::2] == small.coords(local)[::2]
        assert topology.expert_coords(rank)[:2] == small.expert_coords(local)[:2]
    assert {topology.local_rank(chosen, r) for r in range(topology.world)} == {None, *range(small.world)} or (
        topology.replicas == len(chosen)
    )
