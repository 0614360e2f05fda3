"""Several servers that do the same: which one to ask next, and which one to leave alone for a while.

No I/O and no clock of its own. The least busy server that is awake is asked. One that fails rests, and longer each time
it fails again: `rest`, twice, four times, up to `LONGEST_REST`. When all rest, the one that has rested longest is
asked, for a wrong guess about a server costs less than giving up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

LONGEST_REST = 120.0  # seconds


@dataclass(slots=True, eq=False)
class Endpoint:
    url: str
    # Requests under way.
    active: int = 0
    # Failures in a row.
    failures: int = 0
    rests_until: float = 0.0
    asked: int = 0


class Endpoints:
    """`rest` is in seconds. Each `acquire` is followed by one `release`."""

    def __init__(self, urls: Sequence[str], rest: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not urls:
            raise ValueError("no endpoint was given; name at least one URL")
        self.all = [Endpoint(url.rstrip("/")) for url in urls]
        self._rest = rest
        self._clock = clock

    def acquire(self, tried: Collection[Endpoint] = ()) -> Endpoint:
        """The awake endpoint with the fewest requests under way; those in `tried` only when there is no other."""
        now = self._clock()
        awake = [endpoint for endpoint in self.all if endpoint.rests_until <= now]
        if awake:
            choice = [endpoint for endpoint in awake if endpoint not in tried] or awake
            # Among equals the one that was asked least, so that idle endpoints take turns.
            chosen = min(choice, key=lambda endpoint: (endpoint.active, endpoint.asked))
        else:
            chosen = min(self.all, key=lambda endpoint: endpoint.rests_until)
        chosen.active += 1
        chosen.asked += 1
        return chosen

    def release(self, endpoint: Endpoint, ok: bool | None) -> None:
        """`ok` None says nothing about the endpoint, as when the caller gave up."""
        endpoint.active -= 1
        if ok:
            endpoint.failures, endpoint.rests_until = 0, 0.0
        elif ok is not None:
            rest = min(self._rest * 2**endpoint.failures, LONGEST_REST)
            endpoint.failures += 1
            endpoint.rests_until = self._clock() + rest

    def untried(self, tried: Collection[Endpoint]) -> bool:
        """Whether one is awake that is not in `tried`."""
        now = self._clock()
        return any(endpoint.rests_until <= now and endpoint not in tried for endpoint in self.all)
