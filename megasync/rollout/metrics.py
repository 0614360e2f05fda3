"""Metrics of the rollout: counts since the start, means over the latest groups, tokens per second.

Every worker counts its own work (`WorkerMetrics`), and reports each group as a `Summary`. `RolloutMetrics` adds up the
workers, including those that are lost.

Invariant: reading changes nothing. The mean of a workflow's own metric is taken over the samples that have it, so
a key that is missing in some of them neither vanishes nor counts as zero.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megasync.observe.metrics import percentiles
from megasync.rollout.selection import Summary
from megasync.trajectory import Trajectory

# Seconds over which token throughput is measured: several steps of a small run, a part of a large run's step.
RATE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The work of a worker since its start, and now. `client` holds metrics by their full names, which add up."""

    inflight_requests: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    failed_samples: int = 0
    server_failures: int = 0
    # Responses that selection changed or left out: over-long, or sampled and not needed.
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    client: Mapping[str, float] = field(default_factory=dict[str, float])


class WorkerMetrics:
    """Counts the work of one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failed_samples = 0
        self.server_failures = 0
        self.counts: Counter[str] = Counter()
        # Failures by full metric names: what failed, and the kind.
        self.failures: Counter[str] = Counter()
        self._tokens = 0
        self._clock = clock
        self._started = clock()
        self._arrivals: deque[tuple[float, int]] = deque()

    def add_generated(self, trajectories: Iterable[Trajectory]) -> None:
        """Counts responses when they return, whatever happens to them later."""
        tokens = sum(len(t.response_ids) for t in trajectories)
        now = self._clock()
        self._tokens += tokens
        self._arrivals.append((now, tokens))
        while now - self._arrivals[0][0] > RATE_SECONDS:
            self._arrivals.popleft()

    def status(self, inflight_requests: int, client: Mapping[str, float]) -> WorkerStatus:
        return WorkerStatus(
            inflight_requests,
            self._tokens,
            self._rate(),
            self.failed_samples,
            self.server_failures,
            dict(self.counts),
            {**client, **self.failures},
        )

    def _rate(self) -> float:
        now = self._clock()
        elapsed = min(RATE_SECONDS, now - self._started)
        tokens = sum(count for when, count in self._arrivals if now - when <= RATE_SECONDS)
        return tokens / elapsed if elapsed > 0 else 0.0


class RolloutMetrics:
    """Counts groups and drops of all workers. Means and percentiles are over the latest `window` groups."""

    def __init__(self, window: int) -> None:
        self.committed = 0
        self.regenerated = 0
        self.workers_lost = 0
        self.drops: Counter[str] = Counter()
        self._recent: deque[Summary] = deque(maxlen=window)
        self._lengths: deque[Sequence[int]] = deque(maxlen=window)
        self._lost: list[WorkerStatus] = []

    def add_scored(self, summary: Summary, lengths: Sequence[int] = ()) -> None:
        """Adds a group: `lengths` are the tokens of its responses."""
        self._recent.append(summary)
        self._lengths.append(lengths)

    def lost(self, last: WorkerStatus) -> None:
        """Keeps the counts of a lost worker, by its last report. None of its requests is in flight anymore."""
        self.workers_lost += 1
        counts = {name: value for name, value in last.client.items() if not name.endswith(("/inflight", "/paused"))}
        self._lost = [_sum([*self._lost, replace(last, client=counts)])]

    def snapshot(self, workers: Iterable[WorkerStatus]) -> dict[str, float]:
        """Metric name to value. Means are absent until there is something to average."""
        now = list(workers)
        total = _sum([*self._lost, *now])
        means = {
            f"rollout/{name}": sum(s[name][0] for s in summaries) / sum(s[name][1] for s in summaries)
            for name in dict.fromkeys(name for summary in self._recent for name in summary)
            if (summaries := [summary for summary in self._recent if name in summary])
        }
        return {
            **means,
            **percentiles("rollout/response_length", [length for group in self._lengths for length in group]),
            "rollout/tokens": float(total.tokens),
            "rollout/tokens_per_second": sum(status.tokens_per_second for status in now),
            "rollout/groups": float(self.committed),
            "rollout/groups_regenerated": float(self.regenerated),
            "rollout/samples_failed": float(total.failed_samples),
            "rollout/groups_dropped": float(self.drops.total()),
            "rollout/server_failures": float(total.server_failures),
            "rollout/workers_lost": float(self.workers_lost),
            "rollout/inflight_requests": float(sum(status.inflight_requests for status in now)),
            **total.client,
            **{f"rollout/{name}": float(count) for name, count in sorted(total.counts.items())},
            **{f"rollout/dropped_{reason}": float(count) for reason, count in sorted(self.drops.items())},
        }


def _sum(statuses: Sequence[WorkerStatus]) -> WorkerStatus:
    """The counts of all statuses."""
    counts: Counter[str] = Counter()
    client: dict[str, float] = {}
    for status in statuses:
        counts.update(status.counts)
        for name, value in status.client.items():
            client[name] = client.get(name, 0.0) + value
    return WorkerStatus(
        tokens=sum(status.tokens for status in statuses),
        failed_samples=sum(status.failed_samples for status in statuses),
        server_failures=sum(status.server_failures for status in statuses),
        counts=counts,
        client=client,
    )
