"""How many requests may be under way at once, from what the servers' KV caches say. A pure controller.

Too few requests leave servers idle; too many are retracted, or wait in the servers' queues and are old before their
first token. So the cap grows while the servers have room and it is what holds requests back, and shrinks by a factor
when they run out (additive increase, multiplicative decrease; doubling at first, as TCP does, until the first pressure).

Invariant: the cap is never below one request per server, so it can slow a run down and never stop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from megasync.serving.answers import converted

# The cap of a server nobody has heard of yet.
FIRST_REQUESTS = 64
# Share of its former value that the cap keeps under pressure.
DECREASE = 0.8
# Requests per server that it grows by when there is room.
INCREASE = 8
# Queued requests that are no pressure: a share of those running. Requests always arrive in bursts, by groups.
QUEUED_SHARE = 0.25


class _Queues(msgspec.Struct):
    retracted: int = 0


class _Load(msgspec.Struct):
    token_usage: float
    num_running_reqs: int
    num_waiting_reqs: int
    queues: _Queues | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """One server's own report; `token_usage` is the share of its KV cache that is in use, in [0, 1]."""

    token_usage: float
    running: int
    waiting: int
    retracted: int = 0
    # Sampled tokens a second over the last decoding steps, which only the scheduler itself knows (`/server_info`).
    throughput: float = 0.0

    @classmethod
    def parse(cls, answer: Any) -> ServerLoad:
        """From `/v1/loads`: the scheduler's ranks as one. Raises InvalidAnswer for another shape."""
        ranks = converted(answer, _Loads, "/v1/loads").loads
        return cls(
            token_usage=max((rank.token_usage for rank in ranks), default=0.0),
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            retracted=sum(rank.queues.retracted for rank in ranks if rank.queues is not None),
        )


class InflightCap:
    """`limit` is the cap in requests; `update` moves it by what the servers reported since."""

    def __init__(self, servers: int, high_usage: float) -> None:
        """`high_usage` is the share of a KV cache above which a server is under pressure."""
        self._high = high_usage
        self._probing = True
        self._servers = max(1, servers)
        self.limit = FIRST_REQUESTS * self._servers

    def update(self, loads: Sequence[ServerLoad], inflight: int) -> int:
        """The new cap, given the serving servers' loads and the requests under way. No loads: nothing is known, no change."""
        if not loads:
            return self.limit
        self._follow(len(loads))
        if any(self._pressed(load) for load in loads):
            self._probing = False
            # From what is really under way, as a cap far above it would take many steps to matter; and only once it has
            # come down to the cap, or requests that take long would bring the cap down to nothing.
            if inflight <= self.limit:
                self.limit = int(inflight * DECREASE)
        elif inflight >= self.limit:
            self.limit = 2 * self.limit if self._probing else self.limit + INCREASE * len(loads)
        self.limit = max(self.limit, len(loads))
        return self.limit

    def _follow(self, servers: int) -> None:
        """Servers came or went: the cap keeps its value per server."""
        if servers != self._servers:
            self.limit = max(1, self.limit * servers // self._servers)
            self._servers = servers

    def _pressed(self, load: ServerLoad) -> bool:
        if load.running == 0:
            # Paused for a weight sync, its requests put back into the queue: that says nothing about room.
            return False
        return load.retracted > 0 or load.token_usage > self._high or load.waiting > QUEUED_SHARE * max(load.running, 4)
