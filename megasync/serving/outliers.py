"""Gray failures: a server answers probes and serves, but worse than its peers. Pure; no I/O, no Ray.

    fault    observed by                                         a server is restarted after
    -------  --------------------------------------------------  -------------------------------------------------------
    answers  a check: one short generation, sent to the server   BAD_CHECKS bad ones in a row, while the last check of
             directly                                            some peer was good
    slow     the server's own reports: tokens per second, and    SLOW_SECONDS of uninterrupted work below SLOW_SHARE of
             running requests                                    the peers' median, both in tokens per second and in
                                                                 tokens per second and request

Invariant: a server is judged only against a peer that does well. What all servers have in common comes from the
weights or from the load, and no restart cures it. There is one exception: when no server passes its checks, one of them
is restarted, because the sync that follows tells broken servers from broken weights (metric `sync/parity`). No other
server is restarted for this reason until that one has passed a check or is retired; if it fails again, it is restarted
again. So the fleet either gets a good server to compare with, or spends its restart budgets with this reason. A peer
that does not answer its checks vouches for no other server and delays no verdict.

Both measures of speed are needed, because load moves them in opposite directions: a server with a larger batch is
slower per request and faster in total, one with a smaller batch the reverse. Only a server that is slow itself is low
in both.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

# Consecutive bad answers to checks. One may coincide with a weight update that failed and is noticed anyway.
BAD_CHECKS = 2
# A share of the median that neither batch sizes nor mixed hardware of one generation explain. A thermally throttled
# GPU, a degraded link or a neighbour on the same cores easily falls below it.
SLOW_SHARE = 0.25
# Seconds of uninterrupted work that are compared: many times a weight sync, or a long prefill, which starves decoding.
SLOW_SECONDS = 60.0
# The fewest reports within these seconds that allow a judgement; servers report every `rollout.health.probe_seconds`.
FEWEST_REPORTS = 10
# Seconds between two comparisons of one server, each of which looks at all others.
COMPARE_SECONDS = 10.0
# Restarts for slowness, per slot. A server that is still slow after these is limited by its hardware, and better than
# none.
SLOW_RESTARTS = 2


class Load(Protocol):
    """A server's report on itself; `throughput` in sampled tokens per second."""

    @property
    def running(self) -> int: ...
    @property
    def throughput(self) -> float: ...


@dataclass(slots=True)
class _Peer:
    # (clock reading, running requests, tokens per second) of uninterrupted work, and the sums of the last two.
    work: deque[tuple[float, int, float]] = field(default_factory=deque)
    requests: int = 0
    tokens: float = 0.0
    # The clock reading before which its speed is not compared again.
    compare_at: float = 0.0
    # Consecutive bad checks, and consecutive checks without an answer.
    bad: int = 0
    silent: int = 0
    # Whether the last check was good; None before the first.
    good: bool | None = None

    @property
    def vouches(self) -> bool | None:
        """Whether its checks show that it is healthy; None while unknown."""
        if self.good:
            return True
        return False if max(self.bad, self.silent) >= BAD_CHECKS else None

    def worked(self, now: float, running: int, throughput: float) -> None:
        self.work.append((now, running, throughput))
        self.requests += running
        self.tokens += throughput
        while now - self.work[0][0] > SLOW_SECONDS:
            _, running, throughput = self.work.popleft()
            self.requests -= running
            self.tokens -= throughput

    def idle(self) -> None:
        self.work.clear()
        self.requests, self.tokens = 0, 0.0

    def rates(self, now: float) -> tuple[float, float] | None:
        """Tokens per second and running request, and tokens per second in total.

        None unless it worked without a break for the time that is compared, until now.
        """
        work = self.work
        if (
            len(work) < FEWEST_REPORTS
            or now - work[0][0] < 0.9 * SLOW_SECONDS
            or now - work[-1][0] > 0.1 * SLOW_SECONDS
        ):
            return None
        return self.tokens / self.requests, self.tokens / len(work)


class OutlierDetector:
    """Compares the serving servers, each known by its slot. A method that finds a fault returns the reason to log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peers: dict[Hashable, _Peer] = defaultdict(_Peer)
        self._slow_restarts: Counter[Hashable] = Counter()
        # The slot whose server was restarted because no server passed its check; None once one did.
        self._tried: Hashable | None = None

    def left(self, slot: Hashable) -> None:
        """Forgets a server that no longer serves."""
        self._peers.pop(slot, None)

    def retired(self, slot: Hashable) -> None:
        """Forgets a server that will not be restarted."""
        self.left(slot)
        if slot == self._tried:
            self._tried = None

    def reported(self, slot: Hashable, load: Load) -> str | None:
        """Records a load report; returns why this server must be restarted if it alone is slow."""
        peer, now = self._peers[slot], self._clock()
        if load.running == 0:
            peer.idle()
            return None
        peer.worked(now, load.running, load.throughput)
        rates = peer.rates(now)
        if rates is None or now < peer.compare_at:
            return None
        peer.compare_at = now + COMPARE_SECONDS
        return self._slow(slot, rates)

    def checked(self, slot: Hashable, problem: str | None) -> str | None:
        """Records the result of a check; returns why this server must be restarted if its answers alone are invalid."""
        peer = self._peers[slot]
        peer.silent = 0
        peer.good = problem is None
        if peer.good:
            self._tried = None
        peer.bad = 0 if problem is None else peer.bad + 1
        if peer.bad < BAD_CHECKS:
            return None
        others = [other for name, other in self._peers.items() if name != slot]
        good = sum(other.good is True for other in others)
        if not good:
            return self._none_good(slot, others, problem)
        return (
            f"its answers are invalid: {problem}; {peer.bad} bad checks in a row (BAD_CHECKS={BAD_CHECKS}) while "
            f"{good} of {len(others)} other servers passed theirs"
        )

    def unanswered(self, slot: Hashable) -> None:
        """Records a check without an answer, which the server may not be to blame for."""
        self._peers[slot].silent += 1

    def _none_good(self, slot: Hashable, others: list[_Peer], problem: str | None) -> str | None:
        if self._tried not in (None, slot) or any(other.vouches is None for other in others):
            return None
        self._tried = slot
        return (
            f"its answers are invalid: {problem}; {self._peers[slot].bad} bad checks in a row (BAD_CHECKS="
            f"{BAD_CHECKS}), and none of {len(others)} other servers passed theirs: this one gets the weights again "
            f"and is compared with the trainer"
        )

    def _slow(self, slot: Hashable, measured: tuple[float, float]) -> str | None:
        (each, total), now = measured, self._clock()
        others = [rates for name, peer in self._peers.items() if name != slot and (rates := peer.rates(now))]
        if not others or self._slow_restarts.get(slot, 0) >= SLOW_RESTARTS:
            return None
        usual = tuple(median(rates[which] for rates in others) for which in (0, 1))
        if any(rate >= SLOW_SHARE * common for rate, common in zip(measured, usual, strict=True)):
            return None
        self._slow_restarts[slot] += 1
        return (
            f"it is slow: {each:.3g} tokens/s per request and {total:.3g} in total over {SLOW_SECONDS:.0f} s, "
            f"below {SLOW_SHARE:g} (SLOW_SHARE) of the median of {len(others)} peers, {usual[0]:.3g} and {usual[1]:.3g}"
            f"; restart {self._slow_restarts[slot]} of {SLOW_RESTARTS} for slowness"
        )
