"""What the rollout has done so far: counts since the start, means over the last groups, tokens per second.

Invariant: reading changes nothing. A mean of a workflow's own metric is taken over the trajectories that have it, so a
key that is missing in some of them neither vanishes nor counts as zero.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from megasync.trajectory import Trajectory

# Token throughput is measured over this long: several steps of a small run, and a part of a large run's step.
RATE_SECONDS = 30.0


class RolloutTally:
    """Counts groups, drops and tokens. `window` is the number of last groups that the means are over."""

    def __init__(self, window: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.committed = 0
        self.regenerated = 0
        self.failed_samples = 0
        self.drops: Counter[str] = Counter()
        # What happened to responses on their way into a group: over-long, or sampled and not needed.
        self.counts: Counter[str] = Counter()
        self._tokens = 0
        self._recent: deque[Sequence[Trajectory]] = deque(maxlen=window)
        self._clock = clock
        self._started = clock()
        self._arrivals: deque[tuple[float, int]] = deque()

    def generated(self, trajectories: Iterable[Trajectory]) -> None:
        """Notes responses as they come back, whatever becomes of them."""
        tokens = sum(len(t.response_ids) for t in trajectories)
        self._tokens += tokens
        self._arrivals.append((self._clock(), tokens))
        self._forget()

    def scored(self, trajectories: Sequence[Trajectory]) -> None:
        """Notes a scored group: also one that is dropped for being uniform, or the mean reward would be biased."""
        self._recent.append(trajectories)

    def snapshot(self) -> dict[str, float]:
        """Metric name to value. Means are absent until there is something to average."""
        recent = [t for group in self._recent for t in group]
        values: dict[str, list[float]] = {}
        for trajectory in recent:
            for name, value in trajectory.metrics.items():
                values.setdefault(name, []).append(value)
        # Last: a workflow's metric of the same name must not mix with the rollout's own.
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
            **{f"rollout/{name}": float(count) for name, count in sorted(self.counts.items())},
            **{f"rollout/dropped_{reason}": float(count) for reason, count in sorted(self.drops.items())},
        }

    def _rate(self) -> float:
        now = self._clock()
        elapsed = min(RATE_SECONDS, now - self._started)
        tokens = sum(count for when, count in self._arrivals if now - when <= RATE_SECONDS)
        return tokens / elapsed if elapsed > 0 else 0.0

    def _forget(self) -> None:
        now = self._clock()
        while self._arrivals and now - self._arrivals[0][0] > RATE_SECONDS:
            self._arrivals.popleft()
