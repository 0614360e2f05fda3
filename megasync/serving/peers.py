"""Gray failures: a server that answers probes and serves, but alone among its peers does it badly. Pure; no I/O, no Ray.

    fault    what is observed                                                     what a verdict takes
    -------  -------------------------------------------------------------------  ----------------------------------------
    answers  a check of its own: one short generation, asked of it directly       BAD_CHECKS bad ones in a row, while the
                                                                                  last check of some peer was good
    slow     its own reports: tokens a second, and requests that it runs          SLOW_SECONDS of work without a break below
                                                                                  SLOW_SHARE of its peers' median, in tokens
                                                                                  a second and in those per request

Invariant: nobody is judged but against a peer that does well. What all of them do is a matter of the weights or of the
load, and no restart mends it. With one exception: where all fail their checks, one server is started again, once, because
the sync that it then gets tells broken servers from broken weights (`sync/parity`). A server without peers is started again
each time: nothing is trained while it fails, and its restarts run out with this reason.

Both measures of speed are needed, because load moves them in opposite directions: a server with a larger batch is slower
per request and faster in all, one with a smaller batch the reverse. Only one that is slow itself is low in both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

# Bad answers to checks in a row. One may fall into a weight update that went wrong and is noticed anyway.
BAD_CHECKS = 2
# A share of the median that neither batch sizes nor mixed hardware of one generation explain; a thermally throttled GPU, a
# slipped link or a neighbour on the same cores easily gets below it.
SLOW_SHARE = 0.25
# Seconds of uninterrupted work that are compared: many times a long prefill, which starves decoding for a while, and a
# weight sync.
SLOW_SECONDS = 60.0
# Reports within these seconds that make a judgement; servers report every `rollout.health.probe_seconds`.
FEWEST_REPORTS = 10
# Restarts for being slow, per slot. What is slow after these is as slow as its hardware, and better than no server.
SLOW_RESTARTS = 2


class Load(Protocol):
    """What a server reports of itself; `throughput` in sampled tokens a second."""

    @property
    def running(self) -> int: ...
    @property
    def throughput(self) -> float: ...


@dataclass(slots=True)
class _Peer:
    # (clock reading, requests running, tokens a second) of uninterrupted work.
    work: deque[tuple[float, int, float]] = field(default_factory=deque)
    bad: int = 0
    # The last check was good; None before the first.
    good: bool | None = None

    def rates(self) -> tuple[float, float]:
        """Tokens a second per running request, and in all."""
        tokens = sum(throughput for _, _, throughput in self.work)
        return tokens / sum(running for _, running, _ in self.work), tokens / len(self.work)


class Peers:
    """Servers that serve, by any name for their slot. A verdict is the sentence that goes into the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peers: dict[Hashable, _Peer] = {}
        self._slow_restarts: dict[Hashable, int] = {}
        # A server was started again because all failed, and no check was good since.
        self._all_were_bad = False

    def left(self, slot: Hashable) -> None:
        """It serves no more; what was known of it is over."""
        self._peers.pop(slot, None)

    def reported(self, slot: Hashable, load: Load) -> str | None:
        """Takes a report; why this server is to be restarted, if it is alone slow."""
        peer, now = self._peer(slot), self._clock()
        if load.running == 0:
            peer.work.clear()
            return None
        peer.work.append((now, load.running, load.throughput))
        while now - peer.work[0][0] > SLOW_SECONDS:
            peer.work.popleft()
        return self._slow(slot)

    def checked(self, slot: Hashable, problem: str | None) -> str | None:
        """Takes the outcome of a check; why this server is to be restarted, if its answers alone make no sense."""
        peer = self._peer(slot)
        peer.good = problem is None
        if peer.good:
            self._all_were_bad = False
        peer.bad = 0 if problem is None else peer.bad + 1
        if peer.bad < BAD_CHECKS:
            return None
        others = [other for name, other in self._peers.items() if name != slot]
        good = sum(other.good is True for other in others)
        if not good:
            return self._all_bad(peer, others, problem)
        return (
            f"its answers make no sense: {problem}; {peer.bad} bad checks in a row (BAD_CHECKS={BAD_CHECKS}) while "
            f"{good} of {len(others)} other servers answered theirs well"
        )

    def _all_bad(self, peer: _Peer, others: list[_Peer], problem: str | None) -> str | None:
        if (others and self._all_were_bad) or any(other.bad < BAD_CHECKS for other in others):
            return None
        self._all_were_bad = True
        return (
            f"its answers make no sense: {problem}; {peer.bad} bad checks in a row (BAD_CHECKS={BAD_CHECKS}), as of all "
            f"{1 + len(others)} servers: this one is brought the weights again and compared with the trainer"
        )

    def _slow(self, slot: Hashable) -> str | None:
        if self._slow_restarts.get(slot, 0) >= SLOW_RESTARTS or not self._worked(self._peers[slot]):
            return None
        others = [peer.rates() for name, peer in self._peers.items() if name != slot and self._worked(peer)]
        if not others:
            return None
        mine = self._peers[slot].rates()
        usual = tuple(median(rates[which] for rates in others) for which in (0, 1))
        if any(own >= SLOW_SHARE * common for own, common in zip(mine, usual, strict=True)):
            return None
        self._slow_restarts[slot] = self._slow_restarts.get(slot, 0) + 1
        return (
            f"it is slow: {mine[0]:.3g} tokens/s a request and {mine[1]:.3g} in all over {SLOW_SECONDS:.0f} s, below "
            f"{SLOW_SHARE:g} (SLOW_SHARE) of the median of {len(others)} peers, {usual[0]:.3g} and {usual[1]:.3g}; restart "
            f"{self._slow_restarts[slot]} of {SLOW_RESTARTS} for that"
        )

    def _worked(self, peer: _Peer) -> bool:
        """Without a break for as long as is compared, and lately."""
        now, work = self._clock(), peer.work
        return (
            len(work) >= FEWEST_REPORTS
            and now - work[0][0] >= 0.9 * SLOW_SECONDS
            and now - work[-1][0] <= 0.1 * SLOW_SECONDS
        )

    def _peer(self, slot: Hashable) -> _Peer:
        return self._peers.setdefault(slot, _Peer())
