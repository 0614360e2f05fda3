"""Metrics of the rollout: counts since the start, means over the latest groups, tokens per second.

Invariant: reading changes nothing. The mean of a workflow's own metric is taken over the trajectories that have it, so
a key that is missing in some of them neither vanishes nor counts as zero.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from megasync.trajectory import Trajectory

# Seconds over which token throughput is measured: several steps of a small run, a part of a large run's step.
RATE_SECONDS = 30.0


class RolloutMetrics:
    """Counts groups, drops and tokens. Means are over the latest `window` groups."""

    def __init__(self, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.committed = 0
        self.regenerated = 0
        self.failed_samples = 0
        self.server_failures = 0
        self.drops: Counter[str] = Counter()
        # Responses that selection changed or left out: over-long, or sampled and not needed.
        self.counts: Counter[str] = Counter()
        self._tokens = 0
        self._recent: deque[Sequence[Trajectory]] = deque(maxlen=window)
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

    def add_scored(self, trajectories: Sequence[Trajectory]) -> None:
        """Adds a scored group to the means; one dropped for being uniform too, or the mean reward would be biased."""
        self._recent.append(trajectories)

    def snapshot(self) -> dict[str, float]:
        """Metric name to value. Means are absent until there is something to average."""
        recent = [t for group in self._recent for t in group]
        values: dict[str, list[float]] = {}
        for trajectory in recent:
            for name, value in trajectory.metrics.items():
                values.setdefault(name, []).append(value)
        # Last, so that a workflow's metric of the same name does not mix with the rollout's own.
        values |= {
            "reward_mean": [t.reward for t in recent if t.reward is not None],
            "response_length": [float(len(t.response_ids)) for t in recent],
            "truncated_share": [float(t.finish_reason == "length") for t in recent],
        }
        means = {f"rollout/{name}": sum(each) / len(each) for name, each in values.items() if each}
        return means | {
            "rollout/tokens": float(self._tokens),
            "rollout/tokens_per_second": self._rate(),
            "rollout/groups": float(self.committed),
            "rollout/groups_regenerated": float(self.regenerated),
            "rollout/samples_failed": float(self.failed_samples),
            "rollout/groups_dropped": float(self.drops.total()),
            "rollout/server_failures": float(self.server_failures),
            **{f"rollout/{name}": float(count) for name, count in sorted(self.counts.items())},
            **{f"rollout/dropped_{reason}": float(count) for reason, count in sorted(self.drops.items())},
        }

    def _rate(self) -> float:
        now = self._clock()
        elapsed = min(RATE_SECONDS, now - self._started)
        tokens = sum(count for when, count in self._arrivals if now - when <= RATE_SECONDS)
        return tokens / elapsed if elapsed > 0 else 0.0
