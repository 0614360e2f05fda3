"""Which replicas of the trainer feed which server.

Replicas (`Topology.replica_ranks`) are assigned to servers, so that a server has links to few trainer ranks and a
trainer rank to few servers. A server keeps its replicas while others come and go. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# A server's weights, in parts: what a replica sends is a whole number of them.
WHOLE = 16
# Loads of replicas may differ by this part; smaller shares of a server are not worth a link.
TOLERANCE = 0.1


class Feed(NamedTuple):
    """The replicas that send a server its weights, ascending, and how many of the `WHOLE` parts each sends.

    ``turn`` counts the servers that the first of them fed before.
    """

    replicas: tuple[int, ...]
    shares: tuple[int, ...]
    turn: int


def assign_feeds(feeds: Sequence[Feed], servers: int, replicas: int, most: int) -> list[Feed]:
    """Feeds for new servers beside those that have one.

    Args:
        feeds: of the servers that keep theirs.
        servers: number of new ones.
        replicas: replicas of the trainer.
        most: replicas that may share a server.
    """
    load, turns = [0] * replicas, [0] * replicas
    for feed in feeds:
        _note(feed, load, turns)
    busy = min(replicas, most * (len(feeds) + servers))
    level = -(-(sum(load) + WHOLE * servers) // busy)
    least = max(1, int(TOLERANCE * level))
    added: list[Feed] = []
    for _ in range(servers):
        shares: dict[int, int] = {}
        while left := WHOLE - sum(shares.values()):
            others = [replica for replica in range(replicas) if replica not in shares]
            # A replica with room for a part of what is left, unless the rest would be too little for another link.
            fits = [r for r in others if level - load[r] >= left or least <= level - load[r] <= left - least]
            if fits and (len(shares) + 1 < most or level - max(load[r] for r in fits) >= left):
                replica = max(fits, key=lambda r: (load[r], -r))
                shares[replica] = min(left, level - load[replica])
            else:
                replica = min(others, key=lambda r: (load[r], r))
                even = load[replica] + left <= (1 + TOLERANCE) * level
                shares[replica] = left if even else -(-left // (most - len(shares)))
        chosen = tuple(sorted(shares))
        feed = Feed(chosen, tuple(shares[replica] for replica in chosen), turns[chosen[0]])
        _note(feed, load, turns)
        added.append(feed)
    return added


def _note(feed: Feed, load: list[int], turns: list[int]) -> None:
    for replica, share in zip(feed.replicas, feed.shares, strict=True):
        load[replica] += share
        turns[replica] = max(turns[replica], feed.turn + 1)
